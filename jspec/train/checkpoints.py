"""Training states on disk, as Orbax checkpoints.

States are written atomically, so a run that is killed while it saves can resume from the state before. The newest two
remain on disk.
"""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from jspec.checkpoints.converted.orbax import quiet

MAX_KEPT = 2


class TrainState(NamedTuple):
    """Everything that a stopped training run needs in order to continue with the same numbers, under the names on disk.

    Attributes:
      step: number of updates made so far.
      seconds: wall time that they took, evaluations included.
      params: fp32 master weights after these updates.
      moments: the state of the optax optimizer, which holds Adam's first and second moments of every weight.
      key: the key of the run. The random numbers of step i follow from it, from i and from the plan's ``steps``.
      best: the weights with the lowest held-out loss so far.
      lowest: their held-out loss.
    """

    step: int
    seconds: float
    params: Mapping[str, jax.Array]
    moments: Any
    key: jax.Array
    best: Mapping[str, jax.Array]
    lowest: float


class Checkpoints:
    """The training states of one run. Each lies in a subfolder named by its step.

    Args:
      folder: the folder of the run's states; it is created if it does not exist.
    """

    def __init__(self, folder: pathlib.Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=MAX_KEPT, enable_async_checkpointing=False)
        with quiet():
            self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    @property
    def step(self) -> int | None:
        """The step of the newest state, or None if there is none."""
        return self._manager.latest_step()

    def latest(self, like: TrainState) -> TrainState | None:
        """The newest state, or None if there is none. Its arrays have the structure and shapes of those of ``like``."""
        if self.step is None:
            return None
        with quiet():
            stored: Any = self._manager.restore(self.step, args=ocp.args.StandardRestore(_to_stored(like)))
        state = TrainState(**stored)
        return state._replace(key=jax.random.wrap_key_data(state.key))

    def save(self, state: TrainState):
        """Write ``state``, and remove all but the newest two."""
        with quiet():
            self._manager.save(state.step, args=ocp.args.StandardSave(_to_stored(state)))


def _to_stored(state: TrainState) -> dict[str, Any]:
    """``state`` as the dict that is stored; its key, which Orbax cannot write, as an array uint32 ``[2]``."""
    return state._replace(key=jax.random.key_data(state.key))._asdict()
