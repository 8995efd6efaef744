"""EAGLE-3 heads (Li et al., 2025) and P-EAGLE heads, which add mask slots (2026).

Slot i reads residual streams of the target at position i, joined and fused to the head's width, and token i + 1. Its
output head may know a part of the vocabulary only. Methods as in ``jspec.models.eagle``.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from jspec.heads import Eagle3Config
from jspec.models.decoder import MLP, Attention, Layer, add_mlp
from jspec.models.eagle import init_embedding
from jspec.models.layers import Linear, RMSNorm


class FusedLayer(nnx.Module):
    """The first layer: attention reads (normed embedding, normed feature), and its residual is the feature."""

    def __init__(self, config: Eagle3Config, *, dtype, rngs: nnx.Rngs):
        c, D, eps = config.layers, config.layers.hidden_size, config.layers.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.token_norm = RMSNorm(D, eps, dtype=dtype)
        self.feature_norm = RMSNorm(D, eps, dtype=dtype)
        self.attention = Attention(c, 0, in_features=2 * D, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(D, eps, dtype=dtype)
        self.mlp = MLP(c, dtype=dtype, rngs=rngs)

    def __call__(self, embedded, feature, positions, kv, view, after: RMSNorm | None):
        """As ``Layer`` does."""
        normed = self.feature_norm(feature)
        x = jnp.concatenate([self.token_norm(embedded), normed], axis=-1)
        attended, kv = self.attention(x, positions, kv, view)
        return *add_mlp(self, normed if self.norm_before_residual else feature, attended, after), kv


class Eagle3Head(nnx.Module):
    """The layers, the norms around them and the output head.

    Attributes:
      draft_ids: int32 ``[V]``, the head's row for each token of the target, -1 for those that it does not know; None if
        it knows all.
      mask_hidden: ``[E]``, what mask slots have instead of a feature of the target; None in a sequential head.
      mask_feature: ``[D]``, the same fused, once ``prepare`` was called.
    """

    def __init__(self, config: Eagle3Config, *, dtype=jnp.float32, rngs: nnx.Rngs):
        c, D, E = config.layers, config.layers.hidden_size, config.feature_size
        Dt, eps = config.target_hidden_size, config.layers.rms_norm_eps
        self.config = config
        self.embedding = init_embedding(c, rngs, dtype) if config.own_embedding else None
        self.fuse_in = Linear(E, D, bias=config.fuse_bias, dtype=dtype, rngs=rngs) if config.num_aux_layers else None
        self.fuse_norm = RMSNorm(E, eps, dtype=dtype) if config.norm_before_fuse else None
        aux_layers = range(config.num_aux_layers if config.norm_each_aux else 0)
        self.aux_norms = nnx.List([RMSNorm(Dt, eps, dtype=dtype) for _ in aux_layers])
        rest = [Layer(c, i, dtype=dtype, rngs=rngs) for i in range(1, c.num_layers)]
        self.layers: Any = nnx.List([FusedLayer(config, dtype=dtype, rngs=rngs), *rest])  # of two kinds
        self.norm = RMSNorm(D, eps, dtype=dtype) if config.norm_before_head else None
        self.head = Linear(D, config.draft_vocab_size, dtype=dtype, rngs=rngs) if config.own_head else None
        self.draft_ids = nnx.Param(_first_tokens(config)) if config.reduced else None
        self.mask_hidden = nnx.Param(jnp.zeros(E, dtype)) if config.method == "parallel" else None
        self.mask_feature = None

    def embed(self, tokens, target):
        """int32 ``[B, T] -> [B, T, D]``."""
        return target.embed(tokens) if self.embedding is None else self.embedding[...][tokens]

    def fuse(self, features):
        """Joined streams of the target ``[..., E]`` as the layers read them, ``[..., D]``."""
        if self.fuse_norm is not None:
            features = self.fuse_norm(features)
        if self.aux_norms:
            parts = jnp.split(features, len(self.aux_norms), axis=-1)
            features = jnp.concatenate([norm(part) for norm, part in zip(self.aux_norms, parts, strict=True)], axis=-1)
        return features if self.fuse_in is None else self.fuse_in(features)

    def __call__(self, embedded, features, positions, cache, view):
        """Read T slots per row: token embeddings and fused features ``[B, T, D]`` at int32 positions ``[B, T]``.

        Returns:
          the hidden state after each slot ``[B, T, D]``, before the final norm, and the cache.
        """
        norms = [*(layer.attention_norm for layer in self.layers[1:]), None]
        x, normed, kv = self.layers[0](embedded, features, positions, cache[0], view, norms[0])
        written = [kv]
        for layer, after, kv in zip(self.layers[1:], norms[1:], cache[1:], strict=True):
            x, normed, kv = layer(x, normed, positions, kv, view, after)
            written.append(kv)
        return x, tuple(written)

    def draft_logits(self, hidden, target):
        """``[..., D] -> [..., Vd]``, over the head's own vocabulary."""
        normed = hidden if self.norm is None else self.norm(hidden)
        return target.logits(normed) if self.head is None else self.head(normed)

    def logits(self, hidden, target):
        """``[..., D] -> [..., V]``: -inf for tokens that the head does not know, so that its distribution has no mass
        there."""
        logits = self.draft_logits(hidden, target)
        if self.draft_ids is None:
            return logits
        ids = self.draft_ids[...]
        known = (ids >= 0).reshape((1,) * (logits.ndim - 1) + ids.shape)
        return jnp.where(known, jnp.take(logits, jnp.maximum(ids, 0), axis=-1), -jnp.inf)

    def recycle(self, hidden):
        """Hidden states as the fused features of the next slot."""
        return self.norm(hidden) if self.norm is not None and self.config.norm_output else hidden

    def prepare(self) -> "Eagle3Head":
        """Fuse the mask slots' feature once, for serving."""
        if self.mask_hidden is not None:
            fused = self.fuse(self.mask_hidden[...].reshape(1, -1))[0]
            self.mask_feature = nnx.data(nnx.Param(fused))
            self.mask_hidden = nnx.data(None)
        return self

    def cache_shape(self) -> tuple[int, int, int]:
        """(L, G, H) of the keys and values that a slot leaves behind."""
        return self.config.layers.num_layers, self.config.layers.num_kv_heads, self.config.layers.head_dim


def _first_tokens(config: Eagle3Config):
    """The first Vd tokens, a placeholder until a checkpoint or the data say which."""
    ids = jnp.arange(config.layers.vocab_size, dtype=jnp.int32)
    return jnp.where(ids < config.draft_vocab_size, ids, -1)
