"""EAGLE and EAGLE-2 draft heads (Li et al., 2024): a decoder layer that predicts the target's next feature.

A feature is the target's hidden state after its final norm. Slot i reads feature i and token i + 1, and its output is an
estimate of feature i + 1. The target's output head therefore turns that output into the logits of token i + 2, and slot
i + 1 reads it where the true feature is not known yet.

    hidden, cache = head(head.embed(tokens, target), head.fuse(features), positions, cache, view)
    logits = head.logits(hidden, target)             # [B, T, Vd], over the draft vocabulary
    features = head.recycle(hidden)                  # the features that the next slots read; they need no ``fuse``

``Eagle3Head`` has the same methods.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jspec.config.heads import EagleConfig
from jspec.models.cache_pools import LayerShape, cache_shape
from jspec.models.decoder_layer import Layer
from jspec.models.heads.draft_vocabulary import placeholder_ids, rows_of_target, with_draft_tokens
from jspec.models.layers import Norm, linear_maps, looked_up
from jspec.models.w8a8 import with_quantized_inputs


class LayeredHead(nnx.Module):
    """What draft heads with decoder layers have in common; the embedding is the target's unless they have their own."""

    config: Any
    embedding: nnx.Param | None = None

    def embed(self, tokens, target):
        """The embeddings ``[B, T, D]`` of int32 tokens ``[B, T]``, by the draft head's own embedding or the target's."""
        return target.embed(tokens) if self.embedding is None else looked_up(self.embedding[...], tokens)

    def fuse(self, features):
        """Features of the target as the layers read them, ``[..., E] -> [..., D]``; here they are the same."""
        return features

    def recycle(self, hidden):
        """Hidden states ``[B, T, D]`` as the features that the next slots read; here they are the same."""
        return hidden

    def prepare(self):
        """The draft head that serves, with the same arrays and the token of each logit."""
        return with_draft_tokens(with_quantized_inputs(self))

    def cache_shape(self) -> tuple[LayerShape, ...]:
        """The cache of one slot."""
        return cache_shape(self.config.layers)


class EagleHead(LayeredHead):
    """The decoder layers. The output head is the target's, and so is the embedding unless the checkpoint has one.

    Attributes:
      head: a part of the target's output head, ``[Vd, D]``. None if the target's own is used.
      norm: the norm of the output; None without ``config.norms``.
      draft_ids: its tokens, as in ``jspec.models.heads.draft_vocabulary``. None without ``head``.
    """

    def __init__(self, config: EagleConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        c = config.layers
        self.config = config
        self.embedding = init_embedding(c, rngs, dtype) if config.own_embedding else None
        linear = linear_maps(c, "", dtype=dtype, rngs=rngs)
        self.fuse_in = linear("fuse_in", 2 * c.hidden_size, c.hidden_size, bias=config.fuse_bias)
        layers = range(c.num_layers)
        self.layers: Any = nnx.List([Layer(c, i, norm=i > 0 or config.norms, dtype=dtype, rngs=rngs) for i in layers])
        self.norm = Norm(c.hidden_size, c.rms_norm_eps, dtype=dtype) if config.norms else None
        self.head = linear("head", c.hidden_size, config.dimensions["Vd"]) if config.reduced else None
        self.draft_ids = placeholder_ids(config)
        self.draft_tokens = None  # before ``prepare``

    def __call__(self, embedded, features, positions, cache, view):
        """Read T slots of each row: see ``jspec.models.protocols.DraftHead``."""
        x = self.fuse_in(jnp.concatenate([embedded, features], axis=-1))  # the embedding comes first
        if self.norm is None:
            return run_layers(self.layers, x, x, positions, cache, view)
        x, cache = run_layers(self.layers, x, self.layers[0].attention_norm(x), positions, cache, view)
        return self.norm(x), cache

    def logits(self, hidden, target):
        """``[..., D] -> [..., Vd]``. The target's output head, or a part of it, is applied without a norm before it."""
        return target.logits(hidden) if self.head is None else rows_of_target(self.head, hidden, target)


def run_layers(layers, x, normed, positions, cache, view) -> tuple[jax.Array, tuple]:
    """The residual stream ``[B, T, D]`` behind some layers, each of which norms it for the next, and what they cached; other
    arguments as for ``Layer``."""
    written, norms = [], [*(layer.attention_norm for layer in layers[1:]), None]
    for layer, after, kv in zip(layers, norms, cache, strict=True):
        x, normed, kv = layer(x, normed, positions, kv, view, after)
        written.append(kv)
    return x, tuple(written)


def init_embedding(config, rngs: nnx.Rngs, dtype) -> nnx.Param:
    """A random embedding ``[V, D]``."""
    return nnx.Param(0.02 * jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size), dtype))
