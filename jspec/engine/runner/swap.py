"""Swaps between device and host memory: preempted requests with their pages, and recurrent states."""

import collections
import itertools
import weakref
from typing import Any

import jax
import numpy as np

from jspec.engine.runner.device_batch import DeviceBatch
from jspec.engine.runner.program_inputs import ProgramInputs
from jspec.engine.runner.programs import EngineProgram
from jspec.engine.scheduler.schedule import Swap


class SwapBlock:
    """One row, or a part of its pages, in host memory.

    Attributes:
      saved: ``state.Saved``, in host memory.
      key: identifies the share of other processes.
    """

    def __init__(self, saved: Any, key: int):
        self.saved, self.key = saved, key


class Swaps:
    """Copies rows, and parts of their pages, to host memory and back.

    Args:
      batch: has the state.
      inputs: makes the inputs of programs.
    """

    def __init__(self, batch: DeviceBatch, inputs: ProgramInputs):
        self._batch, self._inputs = batch, inputs
        self._keys, self._collected = itertools.count(), collections.deque[int]()

    def swap_out(self, swap: Swap):
        """Copy a request to host memory."""
        programs, pages = self._batch.programs, self._inputs.page_groups(swap.pages)
        blocks = [self._save(programs.save, np.int32(swap.row), group) for group in pages]
        if self._batch.states_bytes:
            blocks.append(self._save(programs.save_states, np.int32(swap.row)))
        self._drop_collected()
        swap.active.saved = blocks

    def swap_in(self, swap: Swap):
        """Copy a request back, into a row and pages that may be others than before."""
        blocks, row = list(swap.active.saved), np.int32(swap.row)
        if self._batch.states_bytes:
            self.restore_states(swap.row, blocks.pop())
        for pages, block in zip(self._inputs.page_groups(swap.pages), blocks, strict=True):
            self._restore(self._batch.programs.restore, block, row, pages)
        swap.active.saved, swap.active.num_saved_pages = None, 0

    def save_states(self, row: int) -> SwapBlock:
        """A copy of a row's recurrent states in host memory."""
        block = self._save(self._batch.programs.save_states, np.int32(row))
        self._drop_collected()
        return block

    def restore_states(self, row: int, block: SwapBlock):
        """Copy recurrent states into a row."""
        self._restore(self._batch.programs.restore_states, block, np.int32(row))

    def _save(self, program: EngineProgram, *args) -> SwapBlock:
        """What a program has copied, in host memory, as a block with a key of its own."""
        saved = to_memory_kind(self._batch.send(program, *args), "device", "pinned_host")
        block = SwapBlock(saved, next(self._keys))
        weakref.finalize(block, self._collected.append, block.key)
        self._batch.broadcast("swap_out", block.key)
        return block

    def _restore(self, program: EngineProgram, block: SwapBlock, *args):
        self._batch.broadcast("swap_in", block.key)
        self._batch.send(program, *args, to_memory_kind(block.saved, "pinned_host", "device"))

    def _drop_collected(self):
        """Have other processes free the blocks that were garbage-collected, each of them once."""
        self._batch.broadcast("drop", [self._collected.popleft() for _ in range(len(self._collected))])


def to_memory_kind(tree: Any, source: str, destination: str) -> Any:
    """A pytree of arrays, of which those in memory of kind ``source`` are copied to ``destination``.

    One call copies them all, because a call for each array takes longer than the program that gathered them.
    """

    def place(array: jax.Array) -> jax.sharding.Sharding:
        sharding = array.sharding
        return sharding.with_memory_kind(destination) if sharding.memory_kind == source else sharding

    return jax.device_put(tree, jax.tree.map(place, tree))
