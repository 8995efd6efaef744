"""The model runner: executes schedules on the device."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jspec.config import EngineConfig
from jspec.engine.adaptive.cost_table import RoundShape, drafts_of, round_shapes
from jspec.engine.aot_cache.costs import Seconds
from jspec.engine.aot_cache.executables import ExecutableCache
from jspec.engine.aot_cache.fingerprint import fingerprint
from jspec.engine.decoding import Decoding
from jspec.engine.multihost.leader import Leader
from jspec.engine.multihost.shard_map import ProgramSharding
from jspec.engine.runner.compile import Program
from jspec.engine.runner.device_batch import DeviceBatch
from jspec.engine.runner.program_inputs import ProgramInputs, row_of
from jspec.engine.runner.programs import (
    PackedProgram,
    StepBuilder,
)
from jspec.engine.runner.round_costs import round_costs
from jspec.engine.runner.split_rounds import SplitRounds, VerifiedDrafts, processes, start_host_copies
from jspec.engine.runner.step_io import Call, CallLogs, RoundLog
from jspec.engine.runner.swap import SwapBlock, SwapBlocks, to_memory_kind
from jspec.engine.runner.warmup import WarmupProgress, run_each
from jspec.engine.scheduler.prefill_batching import Chunk
from jspec.engine.scheduler.schedule import Schedule, Swap
from jspec.models.cache_pools import has_states
from jspec.models.flatten import flatten
from jspec.models.params import DTYPES
from jspec.pallas.collectives.workspace import are_lost
from jspec.pallas.delta_net import chunked
from jspec.text.grammar.grammars import available

GIB = 2**30
LAST_EPOCH = 2**30  # half of int32: calls that were sent already may go on for as many exchanges again


class LostPacket(RuntimeError):
    """A sum over GPUs did not get what another GPU was to send."""

    def __init__(self):
        super().__init__(
            "a GPU waited for another one for two seconds in vain, in a sum over both: its program did not start, or failed"
        )


class ModelRunner(DeviceBatch):
    """Executes schedules: prefills prompts, decodes rows, swaps requests to host memory and back.

    Args:
      target: a ``Decoder``, or a model with its methods.
      draft_model: a model whose arrays the drafter needs, or None.
      decoding: how rounds draft and verify.
      config: sizes of batch, cache and programs.

    Attributes:
      num_draft_tokens: the drafter's own K, which is the largest.
      longest_text: how many tokens a text may have for the drafter to draft after it; None if it has no limit.
      looks_ahead: whether slot i of the drafter's cache depends on token i + 1.
      slots_beyond: as ``Drafter.slots_beyond``.
      width: how many query tokens the target reads for each row in a round of that K.
      draft_lengths: every K of rounds, as a tuple.
      split_rounds: rounds of batches in which a grammar restricts some requests.
      progress: of the newest warm-up.

    Raises:
      ValueError: ``config.width`` is too narrow for the drafts.
    """

    def __init__(
        self,
        target: Any,
        draft_model: Any,
        decoding: Decoding,
        config: EngineConfig,
    ):
        drafter = decoding.make_drafter(target, draft_model)
        most, self.longest_text = drafter.num_draft_tokens, drafter.longest_text
        self.looks_ahead, self.slots_beyond = drafter.aux_layers is not None, drafter.slots_beyond
        target_leaves, merge_target = flatten(target)
        draft_leaves, merge_draft = flatten(draft_model)
        self._config, sharding = config, ProgramSharding.of(target, draft_model)
        self.draft_lengths, self._budgets = tuple(decoding.draft_lengths or (most,)), decoding.budgets
        self._builder = StepBuilder(
            *(merge_target, merge_draft, decoding, config, most, target.config.vocab_size, sharding),
            any(isinstance(shape, tuple) for b in config.batch_buckets for shape in self.round_shapes(b)),
        )
        self.num_draft_tokens, self.width = most, self._builder.width(most)
        require_whole_chunks((target, draft_model), config)
        if self.width <= most:
            raise ValueError(f"width={self.width}: expected at least num_draft_tokens + 1, which is {most + 1}")
        workspace = None
        if sharding is not None and config.peer_packets:
            workspace = sharding.workspace(target, draft_model, DTYPES[config.dtype])
        super().__init__(self._builder, (target_leaves, draft_leaves), self.draft_lengths, workspace)
        # A process compiles for its own devices, so an executable is of no use to another process of the group.
        cache = ExecutableCache(fingerprint(target, draft_model, self._builder) if self.group is None else None)
        for program in self.programs:
            program.cache = cache
        self._highest_epoch = 0  # of sums by packets, as far as logs were read
        self._inputs = ProgramInputs(self.programs, config, target.config.vocab_size)
        self._swap_blocks = SwapBlocks()
        self.progress = WarmupProgress()
        rereads = keeps_states(draft_model)
        self.split_rounds = SplitRounds(self.programs, config, most, lambda *args: self._send(*args), rereads)

    @property
    def swap_pages(self) -> int:
        """How many pages fit into ``config.swap_space``."""
        return int(self._config.swap_space * GIB // max(self.page_bytes, 1))

    @property
    def swap_pages_of_states(self) -> int:
        """How many pages take as much host memory as the recurrent states of one row."""
        return -(-self.states_bytes // max(self.page_bytes, 1))

    @property
    def most_snapshots(self) -> int | None:
        """How many snapshots fit into ``config.snapshot_space``; None without recurrent states of target or drafter."""
        bytes_of_one = self.states_bytes
        return int(self._config.snapshot_space * GIB // bytes_of_one) if bytes_of_one else None

    def round_shapes(self, bucket: int) -> list[RoundShape]:
        """Every round shape of a program of so many rows, in ascending order of K."""
        return round_shapes(self.draft_lengths, self._budgets, bucket)

    def compile_for(self, schedule: Schedule, shape: RoundShape):
        """Compile the programs that the schedule needs, which may take minutes. Nothing else changes."""
        self._compile([(program, args) for program, args in self._needed(schedule, shape) if not program.compiled])
        if schedule.drafting:
            how = self._config.bucket(len(schedule.drafting)), processes(schedule.drafting, self._config)
            if not self.programs.finish[how].compiled:
                self._compile_verify_programs([how])

    def execute(self, schedule: Schedule, shape: RoundShape) -> "Sent":
        """Send all programs of a schedule, with rounds of this shape.

        With ``schedule.needs_processing``, rounds make the most drafts, and all of them are verified.

        It waits for the drafts of constrained requests, whose verify pass the device is busy with.
        """
        if self._highest_epoch > LAST_EPOCH:
            self._highest_epoch = 0
            self.begin_epochs_anew()
        for swap in schedule.swap_out:
            self._swap_out(swap)
        for restore in schedule.restores:
            self._restore_states(restore.row, restore.snapshot.saved)
        if schedule.chunks:
            self._prefill(schedule.chunks)
        for snapshot in schedule.snapshots:
            snapshot.saved = self._save_states(snapshot.row)
            self._broadcast("drop", self._swap_blocks.collected())
        for inputs in self._inputs.admissions([(row_of(active), active.request) for active in schedule.admitted]):
            self.send_packed(self.programs.admit, inputs)
        for swap in schedule.swap_in:
            self._swap_in(swap)
        verified = self.split_rounds.finish(schedule.verifying)
        self.split_rounds.draft(schedule.drafting)
        logs = self._decode(schedule, shape) if schedule.decoding else None
        return Sent(logs, verified)

    def _decode(self, schedule: Schedule, shape: RoundShape) -> CallLogs:
        K = drafts_of(shape)
        if K and self._is_behind(schedule, K):
            self.send_packed(self.programs.catch_up, self._rows(schedule, self._config.max_batch))
        for active in schedule.decoding:
            active.largest_K = K
        program, bucket = self._inputs.decode_program(schedule, shape)
        return start_host_copies(self.send_packed(program, self._rows(schedule, bucket)))

    def _is_behind(self, schedule: Schedule, K: int) -> bool:
        """Whether the drafter may have more tokens to read than the window of a round of K drafts has."""
        return max(active.largest_K for active in schedule.decoding) > K

    def _rows(self, schedule: Schedule, bucket: int) -> Call:
        """The rounds of a schedule, for a program of ``bucket`` rows."""
        actives = schedule.decoding
        rows, pages = map(row_of, actives), [active.pages for active in actives]
        return Call.of(self._config, bucket, [*rows], pages, schedule.rounds)

    def read(self, logs: CallLogs) -> RoundLog:
        """Wait for a call to end; returns its logs on the host, fields ``[rounds, b]``.

        Raises:
          LostPacket: a GPU has waited for another one in vain, so that the logs mean nothing.
        """
        logs = jax.tree.map(np.asarray, logs)
        if logs.epochs is not None:
            if are_lost(logs.epochs):
                raise LostPacket
            self._highest_epoch = int(logs.epochs.max())
        return RoundLog.unpacked(logs)

    def restore(self) -> bool:
        """Rebuild the device state if an error invalidated it.

        It is invalid if a program took its buffers and never returned others, or if the device failed meanwhile.

        Returns:
          whether the state was valid; then the contents of all pages stand.
        """
        self.split_rounds.forget()
        if self._intact():
            return True
        self.reset_state()
        return False

    def warmup(self, pages: Sequence[int]):
        """Compile all programs, several at a time, and run each of them to its end, as ``run_each`` does.

        Args:
          pages: free pages, for rounds of one row.

        Raises:
          NotWanted: nobody waits for that any more.
        """
        on_gpu = jax.default_backend() == "gpu"
        # XLA times kernels on a GPU as it compiles, and more than two programs at a time wait for each other.
        threads = 2 if on_gpu else None
        every, constrained = list(self._every_program()), self._split_programs()
        verifying = [self.programs.verify_pass[b] for b in dict(constrained)]
        verifying += [self.programs.finish[how] for how in constrained]
        runs = 2 if on_gpu else 1  # XLA makes a program's CUDA graph in its second run
        self.progress = WarmupProgress([*(program for program, _ in every), *verifying], runs)
        self._compile(every, threads)
        every += self._compile_verify_programs(constrained, threads)
        run_each(self, self._inputs, every, pages, runs)
        if isinstance(self.group, Leader):
            self.group.wait_for_followers()  # which may compile for longer

    def costs(self) -> Seconds:
        """Seconds per round by rows of the program and round shape, from the cache or measured now.

        Measuring overwrites the contents of all pages.
        """
        self.progress.measuring = True
        try:
            return round_costs(self, self._builder, self._config)
        finally:
            self.progress.measuring = False

    def replace_draft(self, draft_model: Any):
        """Draft with a model of other weights from the next call on; nothing is compiled again.

        Raises:
          ValueError: its arrays differ in number, shape or dtype from those of the model that it replaces, or the devices
            belong to several processes.
        """
        if self.group is not None:
            raise ValueError("drafts cannot be replaced where an engine has devices of several processes")
        target_leaves, old = self.leaves
        new = flatten(draft_model).leaves
        kinds = [[(leaf.shape, leaf.dtype.name) for leaf in leaves] for leaves in (old, new)]
        if kinds[0] != kinds[1]:
            different = next(((a, b) for a, b in zip(*kinds, strict=False) if a != b), (len(old), len(new)))
            raise ValueError(f"draft_model has arrays of {different[1]}: expected {different[0]}, as in the one before")
        self.leaves = (target_leaves, jax.device_put(new, [leaf.sharding for leaf in old]))

    def _prefill(self, chunks: Sequence[Chunk]):
        """Send a prefill batch. Requests that want log-probabilities of their prompts get those of their chunks."""
        logprobs = self.send_packed(*self._inputs.prefill(chunks))
        if logprobs is None:
            return
        logprobs.copy_to_host_async()
        for i, (active, begin, length) in enumerate(chunks):
            if active.request.params.prompt_logprobs is not None:
                active.prompt_logprobs[begin] = length, logprobs, i

    def _swap_out(self, swap: Swap):
        blocks = []
        for pages in self._inputs.page_groups(swap.pages):
            saved = self._send(self.programs.save, np.int32(swap.row), pages)
            blocks.append(self._swap_blocks.allocate(to_memory_kind(saved, "device", "pinned_host")))
            self._broadcast("swap_out", blocks[-1].key)
        if self.states_bytes:
            blocks.append(self._save_states(swap.row))
        self._broadcast("drop", self._swap_blocks.collected())
        swap.active.saved = blocks

    def _save_states(self, row: int) -> SwapBlock:
        """A copy of a row's recurrent states in host memory."""
        saved = self._send(self.programs.save_states, np.int32(row))
        block = self._swap_blocks.allocate(to_memory_kind(saved, "device", "pinned_host"))
        self._broadcast("swap_out", block.key)
        return block

    def _restore_states(self, row: int, block: SwapBlock):
        self._broadcast("swap_in", block.key)
        saved = to_memory_kind(block.saved, "pinned_host", "device")
        self._send(self.programs.restore_states, np.int32(row), saved)

    def _swap_in(self, swap: Swap):
        blocks = list(swap.active.saved)
        if self.states_bytes:
            self._restore_states(swap.row, blocks.pop())
        for pages, block in zip(self._inputs.page_groups(swap.pages), blocks, strict=True):
            self._broadcast("swap_in", block.key)
            saved = to_memory_kind(block.saved, "pinned_host", "device")
            self._send(self.programs.restore, np.int32(swap.row), pages, saved)
        swap.active.saved, swap.active.num_saved_pages = None, 0

    def _needed(self, schedule: Schedule, shape: RoundShape) -> Iterator[tuple[Program, tuple]]:
        """The programs that a schedule needs, with arguments that leave an idle batch as it is."""
        behind = bool(schedule.decoding) and self._is_behind(schedule, drafts_of(shape))
        behind |= bool(schedule.drafting) and self.split_rounds.rereads
        yield from ((program, (program.idle,)) for program in self._inputs.programs_of(schedule, shape, behind))
        swaps, copies = schedule.swap_out or schedule.swap_in, schedule.snapshots or schedule.restores
        # JAX allocates memory for their arguments, each time.
        if (swaps and not self.programs.restore.compiled) or (copies and not self.programs.restore_states.compiled):
            yield from self.swap_programs()

    def _every_program(self) -> Iterator[tuple[Program, tuple]]:
        """All programs that may be needed, with arguments that leave an idle batch as it is."""
        # Those whose arguments are results of others, first.
        excluded = [*self.programs.verify_pass.values(), *self.programs.finish.values()]
        needed = self._split_programs()
        excluded += (program for how, program in self.programs.draft.items() if how not in needed)
        excluded += () if needed else self.programs.grammar.values()
        packed = [
            program for program in self.programs if isinstance(program, PackedProgram) and program not in excluded
        ]
        if len(self.draft_lengths) == 1 and not (needed and self.split_rounds.rereads):
            packed.remove(self.programs.catch_up)
        yield from ((program, (program.idle,)) for program in packed)
        yield from self.swap_programs()

    def _split_programs(self) -> list[tuple[int, bool]]:
        """The draft programs, and those that end a round, that requests with a grammar may need."""
        if not available():
            return []
        return [how for how in self.programs.draft if how[1] or not self._config.reproducible]

    def _compile_verify_programs(
        self, which: Sequence[tuple[int, bool]], threads: int | None = None
    ) -> list[tuple[Program, tuple]]:
        """Compile the programs that verify drafts; those that make them are compiled.

        They take results of others, which run for their shapes; tracing them for that would take long.

        Returns:
          these programs, with arguments that leave an idle batch as it is.
        """
        programs, drafts = self.programs, {b: self.programs.draft[b, processing] for b, processing in which}
        passes = {b: (self._send(draft, draft.idle), programs.verify_pass[b].idle) for b, draft in drafts.items()}
        passing = [(programs.verify_pass[b], args) for b, args in passes.items()]
        self._compile(passing, threads)
        verified = {b: self._send(programs.verify_pass[b], *args) for b, args in passes.items()}
        allowed = {b: self._send(programs.grammar[b], programs.grammar[b].idle) for b in drafts}
        ends = [(programs.finish[b, how], (verified[b], allowed[b], programs.finish[b, how].idle)) for b, how in which]
        self._compile(ends, threads)
        return [*passing, *ends]

    def serving(self):
        """Tell the follower processes that everything is compiled, and that requests are taken now."""
        self._broadcast("serving")


def keeps_states(model: Any) -> bool:
    """Whether a target or draft model has recurrent states; a drafter may have no model, or only arrays."""
    shapes = getattr(model, "cache_shape", None)
    return shapes is not None and has_states(shapes())


def require_whole_chunks(models: Sequence[Any], config: EngineConfig):
    """Raise a ValueError if recurrent states of a model would read prompts in chunks that end within their own."""
    recurrent = any(map(keeps_states, models))
    if recurrent and config.chunk % chunked.CHUNK and config.chunk < config.max_len:
        raise ValueError(
            f"prefill_chunk={config.chunk}: expected a multiple of {chunked.CHUNK}, for models with gated delta nets; "
            "EngineConfig.for_target chooses one"
        )


class Sent(NamedTuple):
    """What ``ModelRunner.execute`` returns.

    Attributes:
      logs: of the rounds, on the way to the host, for which ``ModelRunner.read`` waits; None if the schedule has none.
      verified: the drafts that were verified on their own; None if there are none.
    """

    logs: CallLogs | None
    verified: VerifiedDrafts | None
