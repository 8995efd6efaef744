"""The state of the batch on the device, and how programs are compiled for it and sent.

Every program takes the state and returns a new one in the same memory: the state is *donated*. Only this file touches
donated arrays.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.engine.multihost.leader import Leader, group_of
from jspec.engine.runner.compile import compile_all
from jspec.engine.runner.programs import EngineProgram, PackedProgram, Programs
from jspec.engine.runner.saved import pools, save, save_states, states
from jspec.engine.runner.state import DecodeState
from jspec.engine.runner.step_builder import Leaves, StepBuilder
from jspec.pallas.collectives.workspace import Workspace, are_lost


class DeviceBatch:
    """Weights, programs and the state of the batch, which every program sent replaces.

    Args:
      builder: builds the step of every program.
      leaves: the arrays of the target, and those of the draft model.
      workspace: memory for sums over GPUs by packets, if there are any.

    Attributes:
      builder: as given.
      sharding: how programs run on several devices; None on one.
      group: this process among others that have some of the devices, ``Leader`` or ``Follower``; None if it has all.
      leaves: as given.
      programs: all programs, compiled or not.
      state: the batch, as the last program sent will leave it. Every program takes its buffers away.
      workspace: memory for sums over GPUs by packets; None where there are none of these.
      is_wanted: whether anybody still waits for a compilation; the engine's thread replaces it.
    """

    def __init__(self, builder: StepBuilder, leaves: Leaves, workspace: Workspace | None = None):
        self.builder, self.leaves, self.sharding = builder, leaves, builder.sharding
        self.programs = Programs(builder, leaves[0])
        self.group = None if self.sharding is None else group_of(self.sharding.mesh)
        self.is_wanted: Callable[[], bool] = lambda: True
        self.workspace = workspace
        self.state: DecodeState = self._empty_state()

    @property
    def num_compilations(self) -> int:
        """How many programs are compiled by now."""
        return sum(program.compiled for program in self.programs)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, in all layers of target and drafter."""
        leaves = jax.tree.leaves(pools((self.state.cache, self.state.draft)))
        return sum(math.prod(pool.shape) // pool.shape[1] * pool.dtype.itemsize for pool in leaves)

    @functools.cached_property  # shapes never change, and there may be hundreds of arrays
    def states_bytes(self) -> int:
        """Bytes of the recurrent states of one row, in all layers of target and drafter; 0 without such layers."""
        leaves = jax.tree.leaves(states((self.state.cache, self.state.draft)))
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves) // self.builder.config.num_rows

    def reset_state(self):
        """Replace the state by that of an empty batch."""
        self.broadcast("reset_state")
        self.__dict__.pop("state", None)  # frees its memory for the new one
        if self.workspace is not None:
            self.workspace = self.workspace.renewed()
        self.state = self._empty_state()

    def drop_state(self):
        """Free the device memory of the state, until ``reset_state``."""
        for leaf in jax.tree.leaves(self.__dict__.pop("state", None)):
            leaf.delete()
        if self.workspace is not None:
            self.workspace = dataclasses.replace(self.workspace, memory=None)

    def _empty_state(self) -> DecodeState:
        exchange = None if self.workspace is None else self.workspace.exchange()
        return dataclasses.replace(self.builder.empty_state(self.leaves), exchange=exchange)

    def begin_epochs_anew(self):
        """Have exchanges by packets count from 1 again, once everything sent before has ended.

        If making the new workspace fails, state and old workspace stand: a state never has the addresses of memory that
        nobody holds.
        """
        assert self.workspace is not None
        workspace = self.workspace.renewed()
        state = dataclasses.replace(self.state, exchange=workspace.exchange())
        self.workspace, self.state = workspace, state

    def swap_programs(self) -> Iterator[tuple[EngineProgram, tuple]]:
        """The programs that swap requests to host memory and back, with arguments that change nothing."""
        row, pages = np.int32(0), np.zeros(self.programs.most_moved, np.int32)
        no_row, sharding = np.int32(self.builder.config.num_rows), self.sharding
        yield self.programs.save, (row, pages)
        saved = jax.eval_shape(save, self.state, row, pages)
        yield self.programs.restore, (no_row, pages, self._zeros(saved, sharding and sharding.saved))
        if self.states_bytes:
            yield self.programs.save_states, (row,)
            copy = jax.eval_shape(save_states, self.state, row)
            yield self.programs.restore_states, (no_row, self._zeros(copy, sharding and sharding.saved_states))

    def _zeros(self, shapes: Any, specs: Any) -> Any:
        """Zeros of these shapes, sharded by these specs if there are several devices."""

        def make():
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        return (make if self.sharding is None else self.sharding.creating(make, specs))()

    def _with_operands(self, program: EngineProgram, args: Sequence) -> tuple:
        return *program.spec.operands.of(self.leaves, self.state), *args

    def send_packed(self, program: PackedProgram, inputs: Any) -> Any:
        """Send a program with inputs that are packed into one array; returns its result beside the state."""
        return self.send(program, program.packing.pack(inputs))

    def send(self, program: EngineProgram, *args) -> Any:
        """Send a program and store the state that it returns, if it takes any; returns its other result."""
        on_host = [arg for arg in args if isinstance(arg, np.ndarray | np.generic)]
        args = self._with_operands(program, args)
        program.compile(*args)
        if self.group is not None:
            self.broadcast("send", self.programs.index(program), on_host)
        if program.donate is None:
            return program(*args)
        new, other = program(*args)
        self.state = program.spec.operands.replaced(self.state, new)
        return other

    def compile(self, programs: Sequence[tuple[EngineProgram, tuple]], threads: int | None = None):
        """Compile programs for the arguments that they get beside weights and state.

        All processes of a group compile at the same time, since on GPUs they compare their autotuning results.
        """
        self.broadcast("compile", [self.programs.index(program) for program, _ in programs], threads)
        # Each send replaces the state, so it is looked at only now.
        missing = [(program, self._with_operands(program, args)) for program, args in programs]
        compile_all(missing, threads, self.is_wanted)

    def compile_in_turn(
        self,
        programs: Iterable[PackedProgram],
        threads: int | None = None,
        others: Iterable[tuple[EngineProgram, tuple]] = (),
    ) -> list[tuple[EngineProgram, tuple]]:
        """Compile programs, and those that take results of others when these have run.

        They run for the shapes of their results; tracing them for that would take long. ``others`` have their arguments.

        Returns:
          all of them, with arguments that leave an idle batch as it is.
        """
        done, left, results = list(others), list(programs), {}
        while left:
            ready = [program for program in left if all(what in results for what in program.spec.takes)]
            idle = [(one, (*[results[what] for what in one.spec.takes], one.idle)) for one in ready]
            assert ready, [program.name for program in left]
            self.compile([(program, args) for program, args in (*idle, *done) if not program.compiled], threads)
            taken = {what for program in left for what in program.spec.takes}
            for program, args in idle:
                if program.spec.gives in taken and program.spec.gives not in results:
                    results[program.spec.gives] = self.send(program, *args)
            left = [program for program in left if program not in ready]
            done += idle
        return done

    def broadcast(self, *message: Any):
        """Send a message to the follower processes, if there are any."""
        if isinstance(self.group, Leader):
            self.group.broadcast(*message)

    def wait_for(self, results: Any):
        """Wait for results of programs, or for what they raise.

        Raises:
          ProcessLost: a follower process has ended, without which programs may never end.
        """
        if isinstance(self.group, Leader):
            self.group.wait_for(results)

    def intact(self) -> bool:
        """Whether the state is valid: no program that failed has computed it, or taken its buffers.

        Raises:
          ProcessLost: a follower process has ended.
        """
        leaves = jax.tree.leaves(getattr(self, "state", None))
        if not leaves or any(leaf.is_deleted() for leaf in leaves):
            return False
        try:
            self.wait_for(leaves)
            jax.block_until_ready(leaves)
        except jax.errors.JaxRuntimeError:  # the program that computed it failed
            return False
        exchange = self.state.exchange
        return exchange is None or not are_lost(exchange.epochs)
