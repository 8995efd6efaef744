"""Assistants of Gemma 4 (2026): draft heads that attend to the keys and values of their target, and cache nothing.

Draft j of a round reads the embedding of the token before it and a hidden state: that of the target at its newest token for
the first draft, and its own for the others. All drafts of a round have the position of the newest committed token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jspec.config.heads import AssistantConfig
from jspec.models.cache_pools import LayerShape
from jspec.models.decoder_layer import Layer, apply_layer
from jspec.models.layers import Linear, Norm, linear_maps, looked_up, random_params, times
from jspec.pallas.matmul import matmul


class AssistantHead(nnx.Module):
    """The layers of an assistant, and its output head.

    Attributes:
      fuse_in: from (embedding, hidden state) of the target ``[2 Dt]`` to the layers ``[D]``.
      layers: the decoder layers.
      norm: of their output.
      fuse_out: from there to the hidden state that the next draft reads, ``[D] -> [Dt]``.
      head: ``[V, D]``, the output head; it is never quantised.
      centroids: scores of clusters of tokens, ``[D] -> [Nc]``; None if the output head scores all tokens.
      cluster_tokens: int32 ``[Nc, V / Nc]``, the tokens of each cluster; None likewise.
    """

    def __init__(self, config: AssistantConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        c, Dt = config.layers, config.target_hidden_size
        self.config = config
        # As transformers (5.24) defines it, a window holds one token more here than in the target.
        seen = dataclasses.replace(c, windows=tuple(None if window is None else window + 1 for window in c.windows))
        linear = linear_maps(c, "", dtype=dtype, rngs=rngs)
        self.fuse_in = linear("fuse_in", 2 * Dt, c.hidden_size)
        self.fuse_out = linear("fuse_out", c.hidden_size, Dt)
        self.layers = nnx.List([Layer(seen, i, dtype=dtype, rngs=rngs) for i in range(c.num_layers)])
        self.norm = Norm(c.hidden_size, c.rms_norm_eps, c.norm, dtype=dtype)
        self.head = random_params(rngs, (c.vocab_size, c.hidden_size), 0.02, dtype=dtype).numbers
        clusters, tokens = config.clusters, jnp.arange(c.vocab_size, dtype=jnp.int32)
        self.centroids = None if clusters is None else Linear(c.hidden_size, clusters, dtype=dtype, rngs=rngs)
        self.cluster_tokens = None if clusters is None else nnx.Param(tokens.reshape(clusters, -1))
        # Of the target's embeddings, rounded as the target rounds it.
        self.multiplier = float(np.asarray(Dt**0.5).astype(dtype))

    def prepare(self) -> "AssistantHead":
        """The module itself: nothing is computed before it serves."""
        return self

    def __call__(self, embedded, hidden, positions, caches, view):
        """Read one token of each row.

        Args:
          embedded: ``[B, 1, Dt]``, the target's embedding of the token, as ``Target.embed`` has it.
          hidden: ``[B, 1, Dt]``, of the token before it.
          positions: int32 ``[B, 1]``, by which queries are rotated.
          caches: for each layer, the keys and values of the target that it attends to.
          view: says up to which slot it sees them.

        Returns:
          the hidden state after the final norm ``[B, 1, D]``, from which ``logits`` follow, and the one that the next
          draft reads, ``[B, 1, Dt]``.
        """
        x = self.fuse_in(jnp.concatenate([times(embedded, self.multiplier), hidden], axis=-1))
        norms = [*(layer.attention_norm for layer in self.layers), self.norm]
        normed = x if norms[0] is None else norms[0](x)
        for layer, after, kv in zip(self.layers, norms[1:], caches, strict=True):
            x, normed, _ = apply_layer(layer, x, normed, positions, kv, view, after)
        return normed, self.fuse_out(normed)

    def logits(self, hidden):
        """``[B, 1, D] -> [B, 1, V]``. With clusters, -inf for the tokens of all but the best ones."""
        config, (B, T, _) = self.config, hidden.shape
        if self.centroids is None or self.cluster_tokens is None or config.best_clusters is None:
            return matmul(hidden, self.head[...])
        _, best = jax.lax.top_k(self.centroids(hidden).astype(jnp.float32), config.best_clusters)
        tokens = self.cluster_tokens[...][best].reshape(B, T, -1)
        precision = jax.lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else None
        scores = jnp.einsum("btd,btcd->btc", hidden, looked_up(self.head[...], tokens), precision=precision)
        row, slot = jnp.arange(B)[:, None, None], jnp.arange(T)[None, :, None]
        nothing = jnp.full((B, T, config.layers.vocab_size), -jnp.inf, hidden.dtype)
        return nothing.at[row, slot, tokens].set(scores.astype(hidden.dtype), unique_indices=True)

    def cache_shape(self) -> tuple[LayerShape, ...]:
        """Nothing is cached."""
        return (None,) * len(self.layers)
