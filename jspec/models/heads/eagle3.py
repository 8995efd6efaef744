"""EAGLE-3 draft heads (Li et al., 2025) and P-EAGLE draft heads (2026), which add mask slots.

Slot i reads token i + 1 and the feature of position i: auxiliary hidden states of the target side by side ``[E]``, which
``fuse`` maps to the draft head's width ``[D]``. The output head may have logits for only Vd of the V tokens. The methods
are those of ``jspec.models.heads.eagle``.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from jspec.config.heads import Eagle3Config
from jspec.models.attention import Attention
from jspec.models.decoder_layer import MLP, Layer, add
from jspec.models.heads.draft_vocabulary import placeholder_ids, with_draft_tokens
from jspec.models.heads.eagle import LayeredHead, init_embedding, run_layers
from jspec.models.layers import Norm, linear_maps
from jspec.models.w8a8 import with_quantized_inputs


class FusedLayer(nnx.Module):
    """The first layer: its attention reads (normed embedding, normed feature) ``[2D]``.

    Its residual stream begins with the feature, normed if ``norm_before_residual``."""

    def __init__(self, config: Eagle3Config, *, dtype, rngs: nnx.Rngs):
        c, D, eps = config.layers, config.layers.hidden_size, config.layers.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.token_norm = Norm(D, eps, dtype=dtype)
        self.feature_norm = Norm(D, eps, dtype=dtype)
        self.attention = Attention(c, 0, in_features=2 * D, dtype=dtype, rngs=rngs)
        self.mlp_norm = Norm(D, eps, dtype=dtype)
        self.mlp = MLP(c, dtype=dtype, rngs=rngs)

    def __call__(self, embedded, feature, positions, kv, view, after: Norm | None):
        """Apply the layer; results, ``positions``, ``kv``, ``view`` and ``after`` as for ``Layer``.

        Args:
          embedded: ``[B, T, D]``, the embedding of the token after each slot.
          feature: ``[B, T, D]``, the fused feature of each slot.
        """
        normed = self.feature_norm(feature)
        x = jnp.concatenate([self.token_norm(embedded), normed], axis=-1)
        attended, kv = self.attention(x, positions, kv, view)
        x, normed = add(normed if self.norm_before_residual else feature, attended, self.mlp_norm)
        return *add(x, self.mlp(normed), after), kv


class Eagle3Head(LayeredHead):
    """The decoder layers, the norms around them and the output head.

    Attributes:
      draft_ids: int32 ``[V]``, for each token of the target its index in the draft vocabulary, and -1 for a token that
        the draft head cannot propose. None if it can propose every token.
      mask_hidden: ``[E]``, the learnt feature that mask slots read in place of one of the target. None in a draft head
        without mask slots.
      mask_feature: ``[D]``, the same feature after ``fuse``. None before ``prepare``, and in a head without mask slots.
    """

    def __init__(self, config: Eagle3Config, *, dtype=jnp.float32, rngs: nnx.Rngs):
        c, D, E = config.layers, config.layers.hidden_size, config.feature_size
        Dt, eps = config.target_hidden_size, config.layers.rms_norm_eps
        self.config = config
        self.embedding = init_embedding(c, rngs, dtype) if config.own_embedding else None
        linear = linear_maps(c, "", dtype=dtype, rngs=rngs)
        self.fuse_in = linear("fuse_in", E, D, bias=config.fuse_bias) if config.num_aux_layers else None
        self.fuse_norm = Norm(E, eps, dtype=dtype) if config.norm_before_fuse else None
        aux_layers = range(config.num_aux_layers if config.norm_each_aux else 0)
        self.aux_norms = nnx.List([Norm(Dt, eps, dtype=dtype) for _ in aux_layers])
        rest = [Layer(c, i, dtype=dtype, rngs=rngs) for i in range(1, c.num_layers)]
        self.layers: Any = nnx.List([FusedLayer(config, dtype=dtype, rngs=rngs), *rest])
        self.norm = Norm(D, eps, dtype=dtype) if config.norm_before_head else None
        self.head = linear("head", D, config.draft_vocab_size) if config.own_head else None
        self.draft_ids = placeholder_ids(config)
        self.draft_tokens = None  # before ``prepare``
        self.mask_hidden = nnx.Param(jnp.zeros(E, dtype)) if config.method == "parallel" else None
        self.mask_feature = None

    def fuse(self, features):
        """Turn joined auxiliary hidden states ``[..., E]`` into the features ``[..., D]`` that the layers read."""
        if self.fuse_norm is not None:
            features = self.fuse_norm(features)
        if self.aux_norms:
            parts = jnp.split(features, len(self.aux_norms), axis=-1)
            features = jnp.concatenate([norm(part) for norm, part in zip(self.aux_norms, parts, strict=True)], axis=-1)
        return features if self.fuse_in is None else self.fuse_in(features)

    def __call__(self, embedded, features, positions, cache, view):
        """Read T slots of each row; hidden states are those before the final norm. See
        ``jspec.models.protocols.DraftHead``."""
        return run_layers(self.layers, embedded, features, positions, cache, view)

    def logits(self, hidden, target):
        """``[..., D] -> [..., Vd]``, over the draft vocabulary."""
        normed = hidden if self.norm is None else self.norm(hidden)
        return target.logits(normed) if self.head is None else self.head(normed)

    def recycle(self, hidden):
        """Turn hidden states ``[B, T, D]`` into the fused features of the next slots, normed if ``norm_output``."""
        return self.norm(hidden) if self.norm is not None and self.config.norm_output else hidden

    def prepare(self) -> "Eagle3Head":
        """The draft head that serves, with the same arrays, the fused feature of mask slots and the token of each
        logit."""
        head = with_quantized_inputs(self, head=self.norm is not None)
        if self.mask_hidden is not None:
            fused = self.fuse(self.mask_hidden[...].reshape(1, -1))[0]
            head.mask_feature = nnx.data(nnx.Param(fused))
        return with_draft_tokens(head)
