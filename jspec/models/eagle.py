"""EAGLE and EAGLE-2 heads (Li et al., 2024): a decoder layer that predicts the target's next feature.

Slot i reads feature i of the target, its hidden state after the final norm, and token i + 1; its output is taken for
feature i + 1, so the target's own head makes logits of token i + 2 from it, and slot i + 1 reads it in turn.

    hidden, cache = head(head.embed(tokens, target), head.fuse(features), positions, cache, view)
    logits = head.logits(hidden, target)             # over the target's vocabulary
    features = head.recycle(hidden)                  # of the next slot, fused already

``Eagle3Head`` has the same methods.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jspec.heads import EagleConfig
from jspec.models.decoder import Layer
from jspec.models.layers import Linear


class EagleHead(nnx.Module):
    """The layers; embedding (unless the checkpoint has its own) and output head are the target's."""

    def __init__(self, config: EagleConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        c = config.layers
        self.config = config
        self.embedding = init_embedding(c, rngs, dtype) if config.own_embedding else None
        self.fuse_in = Linear(2 * c.hidden_size, c.hidden_size, bias=config.fuse_bias, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Layer(c, i, norm=i > 0, dtype=dtype, rngs=rngs) for i in range(c.num_layers)])

    def embed(self, tokens, target):
        """int32 ``[B, T] -> [B, T, D]``."""
        return target.embed(tokens) if self.embedding is None else self.embedding[...][tokens]

    def fuse(self, features):
        """Features of the target ``[..., D]`` as the layers read them: as they are."""
        return features

    def __call__(self, embedded, features, positions, cache, view):
        """Read T slots per row: token embeddings and fused features ``[B, T, D]`` at int32 positions ``[B, T]``.

        Returns:
          the hidden state after each slot ``[B, T, D]``, and the cache.
        """
        x = normed = self.fuse_in(jnp.concatenate([embedded, features], axis=-1))  # the embedding comes first
        written, norms = [], [*(layer.attention_norm for layer in self.layers[1:]), None]
        for layer, after, kv in zip(self.layers, norms, cache, strict=True):
            x, normed, kv = layer(x, normed, positions, kv, view, after)
            written.append(kv)
        return x, tuple(written)

    def logits(self, hidden, target):
        """``[..., D] -> [..., V]``: no norm comes before the target's head."""
        return target.logits(hidden)

    def prepare(self):
        """Ready to serve: nothing has to be done before."""
        return self

    def recycle(self, hidden):
        """Hidden states as the fused features of the next slot."""
        return hidden

    def cache_shape(self) -> tuple[int, int, int]:
        """(L, G, H) of the keys and values that a slot leaves behind."""
        return self.config.layers.num_layers, self.config.layers.num_kv_heads, self.config.layers.head_dim


def init_embedding(config, rngs: nnx.Rngs, dtype) -> nnx.Param:
    return nnx.Param(0.02 * jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size), dtype))
