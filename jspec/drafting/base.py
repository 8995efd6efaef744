"""What a drafter is.

A drafter is built inside a trace around its params and settings and has three methods; each takes and returns the
drafter's own state, a pytree that lives in ``DecodeState.draft``.
"""

import dataclasses
from typing import Any, Protocol

import jax

from jspec.sampling.law import Warp
from jspec.sampling.streams import RoundNoise
from jspec.sampling.verify import Proposal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What a drafter may look at, one entry per row.

    Attributes:
      tokens: int32 ``[B, S]``, committed tokens.
      length: int32 ``[B]``, how many.
      room: int32 ``[B]`` in 0..K, most drafts that the row can use; 0 for a row that does not decode.
      table: int32 ``[B, M]``, the row's pages, the same in every pool.
      warp: the request's settings.
      stop_tokens: int32 ``[B, E]``, padded with -1, and
      min_length: int32 ``[B]``, the position before which they are forbidden.
      noise: the round's noise.
    """

    tokens: jax.Array
    length: jax.Array
    room: jax.Array
    table: jax.Array
    warp: Warp
    stop_tokens: jax.Array
    min_length: jax.Array
    noise: RoundNoise


class Drafter(Protocol):
    """A way of proposing tokens."""

    @property
    def num_draft_tokens(self) -> int:
        """K."""
        ...

    def init(self, pages: int, page_size: int, dtype) -> Any:
        """An empty state, with pools of ``pages`` pages of ``page_size`` slots if it keeps keys and values."""
        ...

    def prefill(self, state: Any, tokens: jax.Array, view: Any) -> Any:
        """Read prompt tokens int32 ``[B, C]`` that stand where ``view`` says."""
        ...

    def propose(self, state: Any, context: Context) -> tuple[Any, Proposal]:
        """Draft up to ``context.room`` tokens per row."""
        ...


class Stateless:
    """The two methods of a drafter that keeps nothing between rounds."""

    def init(self, pages: int, page_size: int, dtype) -> tuple[()]:
        """No state."""
        del pages, page_size, dtype
        return ()

    def prefill(self, state, tokens, view):
        """Nothing to read: the committed tokens are in the context of every round."""
        del tokens, view
        return state
