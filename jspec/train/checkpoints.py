"""Training states on disk, as Orbax checkpoints: written whole or not at all, the last two kept."""

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from jspec.checkpoints.orbax import quiet
from jspec.train.loop import TrainState

KEPT = 2


class Checkpoints:
    """The states of one run under a folder, one subfolder a step."""

    def __init__(self, folder: pathlib.Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, enable_async_checkpointing=False)
        with quiet():
            self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    @property
    def step(self) -> int | None:
        """Step of the newest state, None if there is none."""
        return self._manager.latest_step()

    def latest(self, like: TrainState) -> TrainState | None:
        """The newest state, with the structure and shapes of ``like``; None if there is none."""
        if self.step is None:
            return None
        with quiet():
            stored: Any = self._manager.restore(self.step, args=ocp.args.StandardRestore(_plain(like)))
        return stored._replace(key=jax.random.wrap_key_data(stored.key))

    def save(self, state: TrainState):
        """Keep ``state``; older ones than the last two are removed."""
        with quiet():
            self._manager.save(state.step, args=ocp.args.StandardSave(_plain(state)))


def _plain(state: TrainState) -> TrainState:
    """``state`` with the key as an array of numbers."""
    return state._replace(key=jax.random.key_data(state.key))
