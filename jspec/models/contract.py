"""What the engine, the drafters and training ask of a model: any object with these methods can take its place.

Shapes use the letters of ``jspec.config``: B rows, T tokens a row, D width, V vocabulary, L layers, G key/value heads,
H head dimension; E is the size of a feature. A *cache* is what a view keeps, one entry for each layer: ``LayerKV`` of
page pools under ``PagedView``, of the call's own tokens under ``CausalView`` (``jspec.models.cache``).
"""

from typing import Any, Protocol, Self

import jax

from jspec.config import ModelConfig
from jspec.heads import Eagle3Config, EagleConfig
from jspec.models.cache import View


class LanguageModel(Protocol):
    """A causal language model that reads tokens through a view: what a draft model has to be."""

    @property
    def config(self) -> ModelConfig:
        """Its architecture. Of a stand-in only ``vocab_size``, ``max_position`` and ``eos_token_ids`` are asked."""
        ...

    def __call__(self, tokens, positions, cache, view: View) -> tuple[jax.Array, Any]:
        """Read T new tokens of each row.

        Args:
          tokens: int32 ``[B, T]``.
          positions: int32 ``[B, T]``, the absolute position of each.
          cache: what ``view`` keeps, one entry for each layer.
          view: where keys and values go, and what is attended to.

        Returns:
          hidden states after the final norm ``[B, T, D]``, and the cache with the new keys and values.
        """
        ...

    def logits(self, hidden) -> jax.Array:
        """``[..., D] -> [..., V]`` in the model's dtype: the stored logits, by which every distribution is defined."""
        ...

    def cache_shape(self) -> tuple[int, int, int]:
        """(L, G, H) of the keys and values that a token leaves behind."""
        ...


class Target(LanguageModel, Protocol):
    """A language model that heads can draft for: it also shows its hidden states, and lends its embedding and its output
    head."""

    def embed(self, tokens) -> jax.Array:
        """int32 ``[B, T] -> [B, T, D]``."""
        ...

    def with_auxiliary(
        self, tokens, positions, cache, view: View, aux_layers: tuple[int, ...]
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Read tokens as ``__call__`` does, and keep auxiliary hidden states.

        Args:
          tokens, positions, cache, view: as for ``__call__``.
          aux_layers: k is the residual stream after k layers: 0 the embeddings, L what enters the final norm.

        Returns:
          hidden states ``[B, T, D]``, features ``[B, T, E]`` (the streams side by side; the hidden states if
          ``aux_layers`` is ``()``), and the cache.
        """
        ...

    def feature_size(self, aux_layers: tuple[int, ...]) -> int:
        """E, the width of the features that ``with_auxiliary`` returns for ``aux_layers``."""
        ...

    @property
    def output_weight(self) -> jax.Array:
        """``[V, D]``, the output head as it is stored; a tied one is the embedding."""
        ...

    @property
    def output_scale(self) -> jax.Array | None:
        """float32 ``[V]``, what each row of a quantised ``output_weight`` is to be multiplied by, else None."""
        ...

    @property
    def output_norm(self) -> jax.Array:
        """``[D]``, the weight of the final norm."""
        ...


class DraftHead(Protocol):
    """A head of decoder layers that reads (feature i, token i + 1) in slot i: EAGLE, EAGLE-3 and P-EAGLE.

    hidden, cache = head(head.embed(tokens, target), head.fuse(features), positions, cache, view)
    logits = head.logits(hidden, target)             # of token i + 2
    features = head.recycle(hidden)                  # of the next slot, fused already
    """

    @property
    def config(self) -> EagleConfig | Eagle3Config:
        """What it is, its decoder layers among that."""
        ...

    def embed(self, tokens, target: Target) -> jax.Array:
        """int32 ``[B, T] -> [B, T, D]``, by its own embedding or the target's."""
        ...

    def fuse(self, features) -> jax.Array:
        """Features of the target ``[..., E]`` as the layers read them, ``[..., D]``."""
        ...

    def __call__(self, embedded, features, positions, cache, view: View) -> tuple[jax.Array, Any]:
        """Read T slots of each row.

        Args:
          embedded: ``[B, T, D]``, the embedding of the token after each slot.
          features: ``[B, T, D]``, fused.
          positions: int32 ``[B, T]``, the slots.
          cache, view: as for ``LanguageModel``.

        Returns:
          the hidden state after each slot ``[B, T, D]``, and the cache.
        """
        ...

    def logits(self, hidden, target: Target) -> jax.Array:
        """``[..., D] -> [..., V]``, over the target's vocabulary: -inf for tokens that the head does not know."""
        ...

    def recycle(self, hidden) -> jax.Array:
        """Hidden states ``[B, T, D]`` as the fused features of the next slots."""
        ...

    def prepare(self) -> Self:
        """Ready to serve: what does not depend on a request is computed once."""
        ...

    def cache_shape(self) -> tuple[int, int, int]:
        """(L, G, H) of the keys and values that a slot leaves behind."""
        ...


class MaskedHead(DraftHead, Protocol):
    """A head that drafts through mask slots: P-EAGLE, once ``prepare`` was called."""

    @property
    def config(self) -> Eagle3Config:
        """What it is, the token of mask slots among that."""
        ...

    @property
    def mask_feature(self) -> Any:
        """A parameter ``[D]``, the fused feature of mask slots; None before ``prepare`` and in a sequential head."""
        ...
