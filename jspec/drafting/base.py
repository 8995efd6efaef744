"""What a drafter is.

A drafter is built inside a trace around its params and settings and has three methods; each takes and returns the
drafter's own state, a pytree that lives in ``DecodeState.draft``.
"""

import dataclasses
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp

from jspec.config import ModelConfig, Speculation
from jspec.heads import DraftConfig
from jspec.models.cache import PagedView
from jspec.models.contract import Target
from jspec.sampling.distribution import Warp
from jspec.sampling.streams import RoundNoise
from jspec.sampling.verify import Proposal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What a drafter may look at, one entry per row.

    Attributes:
      tokens: int32 ``[B, S]``, committed tokens.
      length: int32 ``[B]``, how many.
      previous: int32 ``[B]``, how many there were when the row's last round with drafts began; one less than its prompt
        at first.
      features: ``[B, K + 1, E]``, what the target knew at positions previous - 1, previous, ..; those up to length - 2
        mean something. None if the drafter needs none.
      live: bool ``[B]``, the row decodes.
      room: int32 ``[B]`` in 0..K, most drafts that the row can use; 0 for a row that does not decode.
      table: int32 ``[B, M]``, the row's pages, the same in every pool.
      warp: the request's settings.
      stop_tokens: int32 ``[B, E]``, padded with -1, and
      min_length: int32 ``[B]``, the position before which they are forbidden.
      noise: the round's noise.
    """

    tokens: jax.Array
    length: jax.Array
    previous: jax.Array
    features: jax.Array | None
    live: jax.Array
    room: jax.Array
    table: jax.Array
    warp: Warp
    stop_tokens: jax.Array
    min_length: jax.Array
    noise: RoundNoise

    def tokens_at(self, positions) -> jax.Array:
        """Committed tokens at int32 ``[B, J]``; positions outside the text give some token."""
        return jnp.take_along_axis(self.tokens, jnp.clip(positions, 0, self.tokens.shape[1] - 1), axis=1)

    def room_within(self, own) -> jax.Array:
        """``room`` under a limit of the drafter's own, int32 ``[B]``."""
        return jnp.minimum(self.room, jnp.maximum(own, 0))

    @property
    def newest_feature(self) -> jax.Array:
        """``[B, 1, E]``: the feature at position length - 2, the last that the target has computed."""
        assert self.features is not None
        return jnp.take_along_axis(self.features, (self.length - 1 - self.previous)[:, None, None], axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompt:
    """C tokens of prompts, as the target has just read them.

    Attributes:
      tokens: int32 ``[B, C]``, and
      following: int32 ``[B, C]``, the token after each.
      features: ``[B, C, E]``, what the target knew at each, or None.
      view: where they stand.
    """

    tokens: jax.Array
    following: jax.Array
    features: jax.Array | None
    view: PagedView


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a drafter is built from, inside a trace.

    Attributes:
      config: of what drafts; None for a method that has no checkpoint.
      target_config: of what it drafts for.
      target: the target's module.
      draft: the draft's module, or the arrays that the method's ``prepare`` made; None if it has neither.
      speculation: K, an integer unless the engine chooses it, and how tokens are drawn.
    """

    config: DraftConfig | None
    target_config: ModelConfig
    target: Target
    draft: Any
    speculation: Speculation


class Drafter(Protocol):
    """A way of proposing tokens."""

    @classmethod
    def build(cls, setup: Setup) -> Self:
        """The drafter around a target and a draft."""
        ...

    @property
    def num_draft_tokens(self) -> int:
        """K."""
        ...

    @property
    def aux_layers(self) -> tuple[int, ...] | None:
        """What it needs of the target, as ``Decoder.with_auxiliary`` takes it; None if it needs nothing."""
        ...

    @property
    def longest_text(self) -> int | None:
        """Tokens of the longest text after which it can draft: it has no position beyond. None if it has no limit."""
        ...

    def init(self, pages: int, page_size: int, dtype) -> Any:
        """An empty state, with pools of ``pages`` pages of ``page_size`` slots if it keeps keys and values."""
        ...

    def prefill(self, state: Any, prompt: Prompt) -> Any:
        """Read a part of prompts."""
        ...

    def propose(self, state: Any, context: Context) -> tuple[Any, Proposal]:
        """Draft up to ``context.room`` tokens per row."""
        ...


class Stateless:
    """What is the same in every drafter that keeps nothing between rounds."""

    aux_layers: tuple[int, ...] | None = None
    longest_text = None

    def init(self, pages: int, page_size: int, dtype) -> tuple[()]:
        """No state."""
        del pages, page_size, dtype
        return ()

    def prefill(self, state, prompt: Prompt):
        """Nothing to read: the committed tokens are in the context of every round."""
        del prompt
        return state
