"""The model runner: executes schedules on the device."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jspec._validation import require
from jspec.config import EngineConfig
from jspec.config.tree import MAX_NODES
from jspec.engine.adaptive.cost_table import RoundShape, drafts_of
from jspec.engine.aot_cache.costs import Seconds
from jspec.engine.aot_cache.executables import ExecutableCache
from jspec.engine.aot_cache.fingerprint import fingerprint
from jspec.engine.decoding import Decoding
from jspec.engine.multihost.leader import NOTICED, Leader
from jspec.engine.request import row_of
from jspec.engine.round_log import CallLogs, RoundLog
from jspec.engine.runner.device_batch import DeviceBatch
from jspec.engine.runner.program_inputs import ProgramInputs
from jspec.engine.runner.programs import EngineProgram, PackedProgram
from jspec.engine.runner.round_costs import round_costs
from jspec.engine.runner.shard_map import ProgramSharding
from jspec.engine.runner.split_rounds import Dispatched, SplitRounds, decode_rows, processes, start_host_copies
from jspec.engine.runner.state import Admission
from jspec.engine.runner.step_builder import StepBuilder
from jspec.engine.runner.swap import Swaps
from jspec.engine.runner.warmup import WarmupProgress, run_each
from jspec.engine.scheduler.prefill_batching import Chunk
from jspec.engine.scheduler.schedule import Schedule
from jspec.models.cache_pools import has_states
from jspec.models.flatten import flatten
from jspec.models.params import DTYPES
from jspec.pallas.collectives.workspace import are_lost, who_was_late
from jspec.pallas.delta_net import chunked
from jspec.text.grammar.grammars import available

GIB = 2**30
LAST_EPOCH = 2**30  # half of int32: calls that were sent already may go on for as many exchanges again


class LostPacket(RuntimeError):
    """A sum over GPUs did not get what another GPU was to send.

    Args:
      epochs: ``Exchange.epochs`` after the call, a copy on each GPU of a mesh, of which one is lost.
    """

    def __init__(self, epochs: jax.Array):
        copies = {shard.device: np.asarray(shard.data) for shard in epochs.addressable_shards}
        devices = list(epochs.sharding.mesh.devices.flat)  # pyright: ignore[reportAttributeAccessIssue]
        late, waited = who_was_late([copies[device] for device in devices])
        others = ", ".join(str(devices[one].id) for one in waited)
        super().__init__(
            f"GPU {devices[late].id} was late: GPU {others} waited for it for two seconds in vain, in an exchange between "
            "both; its program did not start in time, or failed"
        )


class ModelRunner:
    """Executes schedules: prefills prompts, decodes rows, swaps requests to host memory and back.

    Args:
      target: a ``Decoder``, or a model with its methods.
      draft_model: a model whose arrays the drafter needs, or None.
      decoding: how rounds draft and verify.
      config: sizes of batch, cache and programs.

    Attributes:
      batch: weights, programs, and the state on the device.
      num_draft_tokens: the drafter's own K, which is the largest.
      longest_text: how many tokens a text may have for the drafter to draft after it; None if it has no limit.
      looks_ahead: whether slot i of the drafter's cache depends on token i + 1.
      slots_beyond: as ``Drafter.slots_beyond``, of the drafter or of any tree.
      width: how many query tokens the target reads for each row in a round of that K.
      draft_lengths: every K of rounds of chains, as a tuple.
      split_rounds: rounds of batches in which a grammar restricts some requests.
      progress: of the newest warm-up.

    Raises:
      ValueError: ``config.width`` is too narrow for the drafts.
    """

    def __init__(self, target: Any, draft_model: Any, decoding: Decoding, config: EngineConfig):
        rereads = keeps_states(draft_model)
        if rereads or keeps_states(target):
            require_whole_chunks(config)
        drafter = decoding.make_drafter(target, draft_model)
        most, self.longest_text = drafter.num_draft_tokens, drafter.longest_text
        self.looks_ahead = drafter.aux_layers is not None
        target_leaves, merge_target = flatten(target)
        draft_leaves, merge_draft = flatten(draft_model)
        self._config, sharding = config, ProgramSharding.of(target, draft_model)
        builder = StepBuilder(
            merge_target,
            merge_draft,
            decoding,
            config,
            most=most,
            vocab_size=target.config.vocab_size,
            sharding=sharding,
        )
        self.num_draft_tokens, self.draft_lengths = most, builder.draft_lengths
        self.width = builder.width(builder.usual)
        drafters = [drafter, *(decoding.make_drafter(target, draft_model, tree) for tree in builder.trees)]
        self.slots_beyond = max(one.num_draft_tokens + one.slots_beyond for one in drafters) - most
        if self.width <= most:
            raise ValueError(f"width={self.width}: expected at least num_draft_tokens + 1, which is {most + 1}")
        if builder.trees and config.width is not None:
            nodes = max(tree.nodes for tree in builder.trees)
            expected = f"None or a number in {nodes}..{MAX_NODES}, from the nodes of a tree on"
            require(nodes <= config.width <= MAX_NODES, "width", config.width, expected)
        workspace = None
        if sharding is not None and config.peer_packets:
            workspace = sharding.workspace(target, draft_model, DTYPES[config.dtype])
        self.batch = DeviceBatch(builder, (target_leaves, draft_leaves), workspace)
        # A process compiles for its own devices, so an executable is of no use to another process of the group.
        alone = self.batch.group is None
        cache = ExecutableCache(fingerprint(target, draft_model, decoding, config, most) if alone else None)
        for program in self.batch.programs:
            program.cache = cache
        self._highest_epoch = 0  # of sums by packets, as far as logs were read
        self._inputs = ProgramInputs(self.batch.programs, config, target.config.vocab_size)
        self._swaps = Swaps(self.batch, self._inputs)
        self.progress = WarmupProgress()
        self.split_rounds = SplitRounds(self.batch, config, most, rereads)

    @property
    def swap_pages(self) -> int:
        """How many pages fit into ``config.swap_space``."""
        return int(self._config.swap_space * GIB // max(self.batch.page_bytes, 1))

    @property
    def swap_pages_of_states(self) -> int:
        """How many pages take as much host memory as the recurrent states of one row."""
        return -(-self.batch.states_bytes // max(self.batch.page_bytes, 1))

    @property
    def most_snapshots(self) -> int | None:
        """How many snapshots fit into ``config.snapshot_space``; None without recurrent states of target or drafter."""
        bytes_of_one = self.batch.states_bytes
        return int(self._config.snapshot_space * GIB // bytes_of_one) if bytes_of_one else None

    def compile_for(self, schedule: Schedule, shape: RoundShape):
        """Compile the programs that the schedule needs, which may take minutes. Nothing else changes."""
        self.batch.compile([(program, args) for program, args in self._needed(schedule, shape) if not program.compiled])
        if schedule.drafting:
            how = self._config.bucket(len(schedule.drafting)), processes(schedule.drafting, self._config)
            if not self.batch.programs.finish[how].compiled:
                self.batch.compile_in_turn(self._programs_of_split_rounds([how]))

    def execute(self, schedule: Schedule, shape: RoundShape) -> list[Dispatched]:
        """Send all programs of a schedule, with rounds of this shape; returns the rounds, in the order of their programs.

        With ``schedule.needs_processing``, rounds make the most drafts, and all of them are verified.

        It waits for the drafts of constrained requests, whose verify pass the device is busy with.
        """
        if self._highest_epoch > LAST_EPOCH:
            self._highest_epoch = 0
            self.batch.begin_epochs_anew()
        for swap in schedule.swap_out:
            self._swaps.swap_out(swap)
        for restore in schedule.restores:
            self._swaps.restore_states(restore.row, restore.snapshot.saved)
        if schedule.chunks:
            self._prefill(schedule.chunks)
        for snapshot in schedule.snapshots:
            snapshot.saved = self._swaps.save_states(snapshot.row)
        admitted = [Admission(row_of(one), one.request, one.prefix) for one in schedule.admitted]
        for inputs in self._inputs.admissions(admitted):
            self.batch.send_packed(self.batch.programs.admit, inputs)
        for swap in schedule.swap_in:
            self._swaps.swap_in(swap)
        sent = [self.split_rounds.finish(schedule.verifying)]
        self.split_rounds.draft(schedule.drafting)
        if schedule.decoding:
            sent.append(self._decode(schedule, shape))
        return [rounds for rounds in sent if rounds is not None]

    def _decode(self, schedule: Schedule, shape: RoundShape) -> Dispatched:
        K, actives = drafts_of(shape), schedule.decoding
        if K and self._is_behind(schedule, K):
            rows = decode_rows(self._config, self._config.max_batch, actives, schedule.rounds)
            self.batch.send_packed(self.batch.programs.catch_up, rows)
        for active in actives:
            active.largest_K = K
        program, bucket = self._inputs.decode_program(schedule, shape)
        logs = self.batch.send_packed(program, decode_rows(self._config, bucket, actives, schedule.rounds))
        return Dispatched(shape, actives, schedule.rounds, start_host_copies(logs))

    def _is_behind(self, schedule: Schedule, K: int) -> bool:
        """Whether the drafter may have more tokens to read than the window of a round of K drafts has."""
        return max(active.largest_K for active in schedule.decoding) > K

    def read(self, logs: CallLogs) -> RoundLog:
        """Wait for a call to end; returns its logs on the host, fields ``[rounds, b]``.

        Raises:
          LostPacket: a GPU has waited for another one in vain, so that the logs mean nothing.
          ProcessLost: a process that follows this one has ended, whose devices take part in the call.
        """
        self.batch.wait_for(logs)
        epochs, logs = logs.epochs, jax.tree.map(np.asarray, logs)
        if epochs is not None:
            if are_lost(logs.epochs):
                raise LostPacket(epochs)
            self._highest_epoch = int(logs.epochs.max())
        return RoundLog.unpacked(logs)

    def restore(self) -> bool:
        """Rebuild the device state if an error invalidated it.

        It is invalid if a program took its buffers and never returned others, or if the device failed meanwhile.

        Returns:
          whether the state was valid; then the contents of all pages stand.

        Raises:
          ProcessLost: a process that follows this one has ended.
        """
        self.split_rounds.forget()
        if self.batch.intact():
            return True
        if isinstance(self.batch.group, Leader):
            self.batch.group.require_all(NOTICED)  # the end of a process may be what the error was
        self.batch.reset_state()
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
        packed, swaps = self._packed_programs(), list(self.batch.swap_programs())
        runs = 2 if on_gpu else 1  # XLA makes a program's CUDA graph in its second run
        self.progress = WarmupProgress([*packed, *(program for program, _ in swaps)], runs)
        run_each(self.batch, self._inputs, self.batch.compile_in_turn(packed, threads, swaps), pages, runs)
        if isinstance(self.batch.group, Leader):
            self.batch.group.wait_for_followers()  # which may compile for longer

    def costs(self) -> Seconds:
        """Seconds per round by rows of the program and round shape, from the cache or measured now.

        Measuring overwrites the contents of all pages.
        """
        self.progress.measuring = True
        try:
            return round_costs(self.batch)
        finally:
            self.progress.measuring = False

    def replace_draft(self, draft_model: Any):
        """Draft with a model of other weights from the next call on; nothing is compiled again.

        Raises:
          ValueError: its arrays differ in number, shape or dtype from those of the model that it replaces, or the devices
            belong to several processes.
        """
        if self.batch.group is not None:
            raise ValueError("drafts cannot be replaced where an engine has devices of several processes")
        target_leaves, old = self.batch.leaves
        new = flatten(draft_model).leaves
        kinds = [[(leaf.shape, leaf.dtype.name) for leaf in leaves] for leaves in (old, new)]
        if kinds[0] != kinds[1]:
            different = next(((a, b) for a, b in zip(*kinds, strict=False) if a != b), (len(old), len(new)))
            raise ValueError(f"draft_model has arrays of {different[1]}: expected {different[0]}, as in the one before")
        self.batch.leaves = (target_leaves, jax.device_put(new, [leaf.sharding for leaf in old]))

    def _prefill(self, chunks: Sequence[Chunk]):
        """Send a prefill batch. Requests that want log-probabilities of their prompts get those of their chunks."""
        logprobs = self.batch.send_packed(*self._inputs.prefill(chunks))
        if logprobs is None:
            return
        logprobs.copy_to_host_async()
        for i, (active, begin, length) in enumerate(chunks):
            if active.request.params.prompt_logprobs is not None:
                active.prompt_logprobs[begin] = length, logprobs, i

    def _needed(self, schedule: Schedule, shape: RoundShape) -> Iterator[tuple[EngineProgram, tuple]]:
        """The programs that a schedule needs, with arguments that leave an idle batch as it is."""
        behind = bool(schedule.decoding) and self._is_behind(schedule, drafts_of(shape))
        behind |= bool(schedule.drafting) and self.split_rounds.rereads
        yield from ((program, (program.idle,)) for program in self._inputs.programs_of(schedule, shape, behind))
        swaps, copies = schedule.swap_out or schedule.swap_in, schedule.snapshots or schedule.restores
        programs = self.batch.programs
        # JAX allocates memory for their arguments, each time.
        if (swaps and not programs.restore.compiled) or (copies and not programs.restore_states.compiled):
            yield from self.batch.swap_programs()

    def _packed_programs(self) -> list[PackedProgram]:
        """The packed programs that may be needed."""
        programs, config = self.batch.programs, self._config
        # Of rounds in which a grammar restricts requests.
        which = [how for how in programs.draft if available() and (how[1] or not config.pins_shapes)]
        packed = [*programs.prefill.values(), programs.prefill_with_logprobs, programs.admit]
        if len(self.draft_lengths) > 1 or (which and self.split_rounds.rereads):
            packed.append(programs.catch_up)
        packed += [*programs.decode.values(), *programs.processing_decode.values()]
        return packed + self._programs_of_split_rounds(which)

    def _programs_of_split_rounds(self, which: Sequence[tuple[int, bool]]) -> list[PackedProgram]:
        programs, buckets = self.batch.programs, dict(which)
        parts = [programs.draft[how] for how in which] + [programs.verify_pass[b] for b in buckets]
        return parts + [programs.grammar[b] for b in buckets] + [programs.finish[how] for how in which]

    def serving(self):
        """Tell the follower processes that everything is compiled, and that requests are taken now."""
        self.batch.broadcast("serving")


def keeps_states(model: Any) -> bool:
    """Whether a target or draft model has recurrent states; a drafter may have no model, or only arrays."""
    shapes = getattr(model, "cache_shape", None)
    return shapes is not None and has_states(shapes())


def require_whole_chunks(config: EngineConfig):
    """Raise a ValueError if recurrent states would read prompts in chunks that end within their own."""
    if config.chunk % chunked.CHUNK and config.chunk < config.max_len:
        raise ValueError(
            f"prefill_chunk={config.chunk}: expected a multiple of {chunked.CHUNK}, for models with gated delta nets; "
            "EngineConfig.for_target chooses one"
        )
