"""The window of a round: the cache slots that the first pass of a drafter reads, the same number in every round.

After a round, a drafter's cache lags behind the committed text. Some committed tokens have not been read, and some entries
were made from drafts instead of the target's features. All of these stand at or after the first slot that the last round
wrote, and there are at most K + 1 of them. So the window begins at that slot, has K + 1 slots, and is padded on the right.
A slot that is read a second time is rewritten with the same numbers, or with those of true features.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jspec.drafting.base import Context
from jspec.models.kv_cache import PagedView


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window:
    """W slots of each row: real slots first, then mask slots, then padding, which is written nowhere.

    Attributes:
      positions: int32 ``[B, W]``, the positions of the slots, which are consecutive.
      valid: bool ``[B, W]``, whether a slot is read: it is no padding, and the drafter has its position.
      newest: int32 ``[B]``, the index in the window of the last real slot, after which draft 0 is drawn.
    """

    positions: jax.Array
    valid: jax.Array
    newest: jax.Array

    @property
    def masks(self) -> jax.Array:
        """bool ``[B, W]``: whether a slot comes after the real ones, so that it is a mask slot or padding."""
        return jnp.arange(self.positions.shape[1], dtype=jnp.int32)[None] > self.newest[:, None]

    def view(self, context: Context) -> PagedView:
        """The view through which the slots are read and written."""
        return PagedView(context.table, self.positions, self.valid)

    def after_newest(self, values, count: int):
        """The values of the last real slot and the count - 1 slots after it: ``[B, W, ...] -> [B, count, ...]``."""
        index = self.newest[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
        index = index.reshape(*index.shape, *(1,) * (values.ndim - 2))
        return jnp.take_along_axis(values, index, axis=1)


def make_window(context: Context, first, end, num_draft_tokens: int, num_masks: int, max_position: int) -> Window:
    """The window of the slots ``first .. end - 1`` of each row and ``num_masks`` mask slots after them.

    Its width W is K + 1 + num_masks.

    Args:
      context: the context of the round.
      first: int32 ``[B]``, the first real slot. It may be negative, and slots before 0 are invalid.
      end: int32 ``[B]``, the slot after the last real one, at most first + K + 1.
      num_draft_tokens: K.
      num_masks: the number of mask slots in each row.
      max_position: the number of positions that the drafter has.
    """
    places = jnp.arange(num_draft_tokens + 1 + num_masks, dtype=jnp.int32)[None]
    positions = first[:, None] + places
    num_positions = min(max_position, context.tokens.shape[1])
    valid = (
        context.live[:, None] & (positions >= 0) & (positions < jnp.minimum(end[:, None] + num_masks, num_positions))
    )
    return Window(positions, valid, jnp.maximum(end - 1 - first, 0))
