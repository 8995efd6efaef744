"""The protocols that the engine, the drafters and training expect of a model.

Any object with the methods of a protocol can take the model's place. Shapes use the letters of ``jspec.config``: B rows,
T tokens in a row, D width, V vocabulary, L layers, G key/value heads, H head dimension. E is the size of a feature.

A *cache* holds one ``LayerKV`` for each layer with attention (``jspec.models.cache_pools``), a ``DeltaState`` for each with
a gated delta net, and None for a layer that reads another's. With a ``PagedView`` the former are pools of pages, with a
``CausalView`` they are the keys and values of the call's own tokens, and no state is kept.
"""

from typing import Any, Protocol, Self

import jax

from jspec.config import ModelConfig
from jspec.config.heads import Eagle3Config, EagleConfig, MTPConfig
from jspec.models.cache_pools import LayerShape
from jspec.models.kv_cache import View
from jspec.quantization.weight import Weight


class LanguageModel(Protocol):
    """A causal language model that reads tokens through a view. A draft model needs no more than this.

    Example::

        def next_token_logits(model: LanguageModel, tokens, positions, cache, view: View):
            hidden, cache = model(tokens, positions, cache, view)
            return model.logits(hidden[:, -1]), cache
    """

    @property
    def config(self) -> ModelConfig:
        """The architecture. Drafters and engine read ``vocab_size``, ``max_position`` and ``eos_token_ids`` only."""
        ...

    def __call__(self, tokens, positions, cache, view: View) -> tuple[jax.Array, Any]:
        """Read T new tokens of each row.

        Args:
          tokens: int32 ``[B, T]``.
          positions: int32 ``[B, T]``, the absolute position of each token.
          cache: the keys and values that ``view`` reads and writes, one entry for each layer.
          view: decides where keys and values are written and to what the tokens attend.

        Returns:
          hidden states after the final norm ``[B, T, D]``, and the cache with the new keys and values.
        """
        ...

    def logits(self, hidden) -> jax.Array:
        """``[..., D] -> [..., V]`` in the model's dtype. These rounded logits define the model's distribution. A draft
        model with a draft vocabulary has ``[..., Vd]``."""
        ...

    def cache_shape(self) -> tuple[LayerShape, ...]:
        """What each layer caches for a token, or keeps of a row; None for layers that read the cache of another."""
        ...


class Target(LanguageModel, Protocol):
    """A language model that draft heads can draft for.

    It also returns auxiliary hidden states, and it lends its embedding and its output head.

    Example::

        def features_of(target: Target, tokens, positions, cache, view: View):
            _, features, cache = target.with_auxiliary(tokens, positions, cache, view, aux_layers=(2, 16, 29))
            assert features.shape[-1] == target.feature_size((2, 16, 29))
            return features, cache
    """

    def embed(self, tokens) -> jax.Array:
        """The embeddings ``[B, T, D]`` of int32 tokens ``[B, T]``."""
        ...

    def with_auxiliary(
        self, tokens, positions, cache, view: View, aux_layers: tuple[int, ...]
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Read tokens as ``__call__`` does, and also return auxiliary hidden states.

        Args:
          tokens, positions, cache, view: as for ``__call__``.
          aux_layers: which residual streams to return: k is the one after k layers, so 0 is the embeddings and L is the
            input of the final norm.

        Returns:
          hidden states after the final norm ``[B, T, D]``, features ``[B, T, E]``, and the cache. The features are the
          chosen residual streams side by side. If ``aux_layers`` is ``()``, they are the hidden states.
        """
        ...

    def feature_size(self, aux_layers: tuple[int, ...]) -> int:
        """E, the size of the features that ``with_auxiliary`` returns for ``aux_layers``."""
        ...

    def before_head(self, hidden) -> jax.Array:
        """The inputs of the output head for hidden states ``[..., D]``."""
        ...

    def scaled_logits(self, products) -> jax.Array:
        """Logits ``[..., V]`` from the products of ``before_head`` and the output weight, in their dtype."""
        ...

    @property
    def output_weight(self) -> Weight:
        """The weight ``[V, D]`` of the output head. A tied output head is the embedding."""
        ...

    @property
    def output_norm(self) -> jax.Array:
        """The factors of the final norm, ``[D]``."""
        ...


class DraftHead(Protocol):
    """A draft head made of decoder layers, whose slot i reads feature i and token i + 1: EAGLE, EAGLE-3, P-EAGLE and
    MTP.

    hidden, cache = head(head.embed(tokens, target), head.fuse(features), positions, cache, view)
    logits = head.logits(hidden, target)             # slot i has the logits of token i + 2
    features = head.recycle(hidden)                  # the features that slot i + 1 reads; they need no ``fuse``

    Example::

        def draft(head: DraftHead, target: Target, tokens, features, positions, cache, view: View):
            hidden, cache = head(head.embed(tokens, target), head.fuse(features), positions, cache, view)
            return head.logits(hidden, target).argmax(-1), head.recycle(hidden), cache
    """

    @property
    def config(self) -> EagleConfig | Eagle3Config | MTPConfig:
        """The config of the draft head, with that of its decoder layers."""
        ...

    def embed(self, tokens, target: Target) -> jax.Array:
        """The embeddings ``[B, T, D]`` of int32 tokens ``[B, T]``, by the draft head's own embedding or the target's."""
        ...

    def fuse(self, features) -> jax.Array:
        """Turn features of the target ``[..., E]`` into the features ``[..., D]`` that the layers read."""
        ...

    def __call__(self, embedded, features, positions, cache, view: View) -> tuple[jax.Array, Any]:
        """Read T slots of each row.

        Args:
          embedded: ``[B, T, D]``, the embedding of the token after each slot.
          features: ``[B, T, D]``, the feature of each slot, fused.
          positions: int32 ``[B, T]``, the slots.
          cache, view: as for ``LanguageModel``.

        Returns:
          the hidden state of each slot ``[B, T, D]``, and the cache with the new keys and values.
        """
        ...

    def logits(self, hidden, target: Target) -> jax.Array:
        """``[..., D] -> [..., Vd]``, over the draft vocabulary: all V tokens if ``config.reduced`` is False."""
        ...

    def recycle(self, hidden) -> jax.Array:
        """Turn hidden states ``[B, T, D]`` into the fused features ``[B, T, D]`` of the next slots."""
        ...

    def prepare(self) -> Self:
        """Compute everything that does not depend on a request, before serving; returns the draft head that serves."""
        ...

    def cache_shape(self) -> tuple[LayerShape, ...]:
        """What each layer caches for a slot."""
        ...


class MaskedHead(DraftHead, Protocol):
    """A draft head that drafts through mask slots: P-EAGLE, once ``prepare`` was called.

    Example::

        def mask_slots(head: MaskedHead, B: int, count: int):
            return jax.numpy.broadcast_to(head.mask_feature[...], (B, count, head.config.layers.hidden_size))
    """

    @property
    def config(self) -> Eagle3Config:
        """The config of the draft head, with the token that mask slots read."""
        ...

    @property
    def mask_feature(self) -> Any:
        """The fused feature of mask slots, a parameter ``[D]``. None before ``prepare`` and without mask slots."""
        ...
