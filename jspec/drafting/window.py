"""The window: the slots that a drafter's first pass of a round reads, the same number in every round.

A round leaves a drafter's cache behind in two ways: tokens that were committed but not read, and entries that were made
from guesses. Both begin at the first slot that the last round touched, so reading K + 1 slots from there on,
right-padded, always catches up; a slot that is read again is rewritten with the same numbers, or with better ones."""

import dataclasses

import jax
import jax.numpy as jnp

from jspec.drafting.base import Context
from jspec.models.cache import PagedView


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window:
    """W slots per row: the real ones, then mask slots, then padding, which writes nowhere.

    Attributes:
      positions: int32 ``[B, W]``, consecutive.
      valid: bool ``[B, W]``, not padding, and a slot that the drafter has.
      newest: int32 ``[B]``, index of the last real slot, the one that the first draft is drawn after.
    """

    positions: jax.Array
    valid: jax.Array
    newest: jax.Array

    @property
    def masks(self) -> jax.Array:
        """bool ``[B, W]``: mask slots, and the padding behind them."""
        return jnp.arange(self.positions.shape[1], dtype=jnp.int32)[None] > self.newest[:, None]

    def view(self, context: Context) -> PagedView:
        """Where the slots are written."""
        return PagedView(context.table, self.positions, self.valid)

    def after_newest(self, values, count: int):
        """``[B, W, ...] -> [B, count, ...]``: of the last real slot and the mask slots after it."""
        index = self.newest[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
        index = index.reshape(*index.shape, *(1,) * (values.ndim - 2))
        return jnp.take_along_axis(values, index, axis=1)


def make_window(context: Context, first, end, num_draft_tokens: int, num_masks: int, max_position: int) -> Window:
    """The slots ``first .. end - 1`` of each row and mask slots after them, in K + 1 + num_masks places.

    Args:
      context: the round.
      first, end: int32 ``[B]``; at most K + 1 apart. Slots before 0 do not exist.
      num_draft_tokens: K.
      num_masks: mask slots per row.
      max_position: slots from here on are not the drafter's.
    """
    places = jnp.arange(num_draft_tokens + 1 + num_masks, dtype=jnp.int32)[None]
    positions = first[:, None] + places
    reach = min(max_position, context.tokens.shape[1])
    valid = context.live[:, None] & (positions >= 0) & (positions < jnp.minimum(end[:, None] + num_masks, reach))
    return Window(positions, valid, jnp.maximum(end - 1 - first, 0))
