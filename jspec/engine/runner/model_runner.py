"""What happens on the device: the weights, the compiled programs, and the state of the batch that they hand on.

Every program takes the state and gives a new one back, in the same memory: the state is *donated*. Only this file
touches donated arrays.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import EngineConfig
from jspec.drafting.base import Drafter
from jspec.engine.adaptive.cost_table import Way, budget_of, drafts_of, every_way
from jspec.engine.aot_cache.costs import Seconds, kept_or_measured
from jspec.engine.aot_cache.executables import KeptPrograms
from jspec.engine.aot_cache.fingerprint import made_of
from jspec.engine.multihost.leader import Leader, group_of
from jspec.engine.multihost.shard_map import Spread
from jspec.engine.request import ActiveRequest, Request
from jspec.engine.runner.compile import Program, compile_all
from jspec.engine.runner.programs import (
    WEIGHTS_THEN_STATE,
    Budgets,
    Leaves,
    PackedProgram,
    Programs,
    StepBuilder,
    every_token_is_read,
)
from jspec.engine.runner.state import DecodeState, Entries, of_rows, save
from jspec.engine.runner.step_io import Call, CallLogs, RoundLog, Segments, no_segments, page_tables
from jspec.engine.runner.structured_output import Constrained, Failure, Judged, on_the_way
from jspec.engine.runner.swap import Parts, moved
from jspec.engine.scheduler.prefill_batching import Segment
from jspec.engine.scheduler.schedule import Move, Plan
from jspec.models.flatten import flatten
from jspec.sampling.params import SamplingParams
from jspec.sampling.streams import RoundNoise
from jspec.text.grammar.grammars import available

TIMED_CALLS = 5  # of a decode program, when its cost is measured
GIB = 2**30


class Runner:
    """Carries out what the scheduler decides: reads prompts, decodes rows, moves requests to host memory and back.

    Args:
      target: a ``Decoder`` or its like.
      draft_model: a model whose arrays the drafter needs, or None.
      make_drafter: builds the drafter around target and draft model, inside a trace; given a number of drafts as well,
        one that drafts so many.
      verify: the name of a verification rule.
      config: what may be used.
      noise: where the noise of a round comes from.
      draft_lengths: every K for which rounds may be asked; None is the drafter's own K alone.
      budgets: for so many rows and a K, how many tokens the target may be told to read in a round, None for all.

    Attributes:
      num_draft_tokens: the drafter's own K, which is the largest.
      longest_text: how many tokens a text may have for the drafter to draft after it; None if it has no limit.
      looks_ahead: whether slot i of the drafter's cache depends on token i + 1.
      width: how many query tokens the target reads for each row in a round of that K.
      draft_lengths: every K for which rounds may be asked, as a tuple.
      spread: how programs run on several devices; None on one.
      group: what this process is to others that have some of the devices, ``Leader`` or ``Follower``; None if it has all.
      leaves: the arrays of the target, and those of the draft model.
      programs: all programs, compiled or not.
      state: the batch, as the last program sent will leave it. Every program takes its buffers away.
      is_wanted: says whether somebody still waits for what is being compiled; may be replaced.

    Raises:
      ValueError: ``config.width`` is too narrow for the drafts.
    """

    def __init__(
        self,
        target: Any,
        draft_model: Any,
        make_drafter: Callable[..., Drafter],
        verify: str,
        config: EngineConfig,
        noise: Callable[..., RoundNoise] = RoundNoise,
        draft_lengths: Sequence[int] | None = None,
        budgets: Budgets = every_token_is_read,
    ):
        drafter = make_drafter(target, draft_model)
        most, self.longest_text = drafter.num_draft_tokens, drafter.longest_text
        self.looks_ahead, self.slots_beyond = drafter.aux_layers is not None, drafter.slots_beyond
        target_leaves, merge_target = flatten(target)
        draft_leaves, merge_draft = flatten(draft_model)
        self._config, self.spread = config, Spread.of(target, draft_model)
        self.is_wanted: Callable[[], bool] = lambda: True
        self.draft_lengths, self._budgets = tuple(draft_lengths or (most,)), budgets
        self._builder = StepBuilder(
            *(merge_target, merge_draft, make_drafter, verify, config, noise, most, target.config.vocab_size),
            *(self.spread, budgets, any(isinstance(way, tuple) for b in config.batch_buckets for way in self.ways(b))),
        )
        self.num_draft_tokens, self.width = most, self._builder.width(most)
        if self.width <= most:
            raise ValueError(f"width={self.width}: expected at least num_draft_tokens + 1, which is {most + 1}")
        self.leaves: Leaves = (target_leaves, draft_leaves)
        self.programs = Programs(self._builder, target_leaves, self.draft_lengths)
        self.group = None if self.spread is None else group_of(self.spread.mesh)
        # What one process compiled for its own devices is of no use to another.
        kept = KeptPrograms(made_of(target, draft_model, self._builder) if self.group is None else None)
        for program in self.programs:
            program.kept = kept
        self.state: DecodeState = self._builder.empty_state(self.leaves)
        self._parts = Parts()
        self.constrained = Constrained(self.programs, config, most)

    @property
    def num_compilations(self) -> int:
        """How many programs are compiled by now."""
        return sum(program.compiled for program in self.programs)

    @property
    def page_bytes(self) -> int:
        """How many bytes the contents of a page have, in all layers of target and drafter."""
        pools = jax.tree.leaves((self.state.cache, self.state.draft))
        return sum(math.prod(pool.shape) // pool.shape[1] * pool.dtype.itemsize for pool in pools)

    @property
    def swap_pages(self) -> int:
        """How many pages fit into ``config.swap_space``."""
        return int(self._config.swap_space * GIB // max(self.page_bytes, 1))

    def ways(self, bucket: int) -> list[Way]:
        """Every way in which rounds of so many rows may be asked for, in ascending order of K."""
        return every_way(self.draft_lengths, self._budgets, bucket)

    def compile_for(self, plan: Plan, way: Way):
        """Compile what the plan needs and is not compiled yet, which may take minutes. Nothing else changes."""
        self._compile([(program, args) for program, args in self._needed(plan, way) if not program.compiled])
        if plan.drafting:
            self._compile_judges([self._config.bucket(len(plan.drafting))])

    def carry_out(self, plan: Plan, way: Way) -> "Sent":
        """Send all programs of a plan, whose rounds are made that way; with the most drafts, all verified, if
        ``plan.needs_processing``.

        It waits for the drafts of constrained requests, unless it sends other rounds behind the program that drafts. The
        device is not idle meanwhile if it was sent rounds before.
        """
        for move in plan.leaving:
            self._swap_out(move)
        if plan.segments:
            self._read_segments(plan.segments)
        for entering in self._groups(plan.entering):
            self._tell(self.programs.admit, self._entries([(_row(active), active.request) for active in entering]))
        for move in plan.returning:
            self._swap_in(move)
        self.constrained.draft(plan.drafting, self._send)
        judged = self.constrained.judge(plan.judging, self._send)
        return Sent(self._decode(plan, way) if plan.decoding else None, judged, self.constrained.failures())

    def _decode(self, plan: Plan, way: Way) -> CallLogs:
        K = drafts_of(way)
        if 0 < K < max(active.largest_K for active in plan.decoding):  # a round of K drafts reads too short a window
            self._tell(*self._catch_up(plan))
        for active in plan.decoding:
            active.largest_K = K
        return on_the_way(self._tell(*self._call(plan, way)))

    def read(self, logs: CallLogs) -> RoundLog:
        """Wait for a call to end: its logs on the host, fields ``[rounds, b]``."""
        return RoundLog.unpacked(jax.tree.map(np.asarray, logs))

    def restore(self) -> bool:
        """Have a sound state again after anything may have happened: an exception, an error of the device.

        The state is kept if it is whole. It is not if a program took its buffers and never gave others back, or if the
        device failed while it computed them; then it is made anew.

        Returns:
          whether it was kept, and with it the contents of all pages.
        """
        self.constrained.forget()
        if self._intact():
            return True
        self.begin_anew()
        return False

    def begin_anew(self):
        """Have the state of an empty batch."""
        self._lead("begin_anew")
        self.__dict__.pop("state", None)  # its memory is needed
        self.state = self._builder.empty_state(self.leaves)

    def warmup(self):
        """Compile all programs, several at a time, and run each of them on an idle batch."""
        every, on_gpu = list(self._every_program()), jax.default_backend() == "gpu"
        # XLA times kernels on a GPU as it compiles, and more than two programs at a time wait for each other.
        threads = 2 if on_gpu else None
        self._compile(every, threads)
        judged = self._config.batch_buckets if available() else ()
        self._compile_judges(judged, threads)
        for _ in range(2 if on_gpu else 1):  # XLA makes a program's CUDA graph in its second run
            for program, args in every:
                self._send(program, *args)
            for b in judged:
                draft, judge = self.programs.draft[b], self.programs.judge[b]
                self._send(judge, self._send(draft, draft.idle), judge.idle)
        if isinstance(self.group, Leader):
            self.group.meet()  # the others may compile for longer

    def costs(self) -> Seconds:
        """For the rows of each decode program, way of making rounds -> seconds per round, as an earlier start has kept them
        or as they are measured now. Then the contents of all pages are lost."""
        builder, ways = self._builder, {b: self.ways(b) for b in self._config.batch_buckets}
        arrays = [[(leaf.shape, leaf.dtype.name) for leaf in leaves] for leaves in self.leaves]
        method = type(builder.step(self.leaves, self.num_draft_tokens).drafter).__name__
        what = method, builder.verify, self._config, self.draft_lengths, arrays, self.spread and self.spread.shards

        def measure():
            return {b: {way: self.measure(b, way) for way in some} for b, some in ways.items()}

        return kept_or_measured(what, method, ways, measure)

    def measure(self, bucket: int, way: Way) -> float:
        """How many seconds a round of ``bucket`` rows takes that is made so: the median of a few calls, on an idle batch
        after ``warmup``, with every row in a text of half of ``max_len``. The contents of all pages are lost."""
        config, seconds = self._config, []
        prompt, forever = [0] * max(config.max_len // 2, 1), SamplingParams(max_tokens=config.max_len)
        request = Request(0, prompt, forever, np.zeros(2, np.uint32))
        rows = [(row, request) for row in range(bucket)]
        places = np.arange(bucket * config.pages_per_row).reshape(bucket, -1)
        pages = (1 + places % (config.pool_pages - 1)).tolist()  # rows may share pages: what they write is nobody's
        call = Call.of(config, bucket, range(bucket), pages, config.rounds)
        for _ in range(TIMED_CALLS + 1):
            for first in range(0, bucket, self.programs.most_entries):
                some = rows[first : first + self.programs.most_entries]
                self._tell(
                    self.programs.admit, Entries.of(config, self._builder.vocab_size, self.programs.most_entries, some)
                )
            jax.block_until_ready(self.state.outcome)
            started = time.perf_counter()
            logs = self.read(self._tell(self.programs.decode[bucket, drafts_of(way), budget_of(way)], call))
            seconds.append((time.perf_counter() - started) / logs.num_rounds)
        return statistics.median(seconds[1:])

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

    def _read_segments(self, segments: Sequence[Segment]):
        """Send a prefill pass. Requests that want log-probabilities of their prompts get those of their segments."""
        logprobs = self._tell(*self._pass(segments))
        if logprobs is None:
            return
        logprobs.copy_to_host_async()
        for i, (active, begin, length) in enumerate(segments):
            if active.request.params.prompt_logprobs is not None:
                active.prompt_logprobs[begin] = length, logprobs, i

    def _pass(self, segments: Sequence[Segment]) -> tuple[PackedProgram, Segments]:
        """The prefill program for these segments, and what it is told."""
        config = self._config
        n, program = next((n, self.programs.prefill[n]) for n in config.segment_buckets if n >= len(segments))
        if any(segment.active.request.params.prompt_logprobs is not None for segment in segments):
            n, program = config.logprob_segments, self.programs.prefill_with_logprobs
        told = no_segments(config, n)
        start, count = told.start.copy(), told.count.copy()
        for i, (active, begin, length) in enumerate(segments):
            told.tokens[i, : length + 1] = active.request.prompt[begin : begin + length + 1]
            start[i], count[i] = begin, length
            if begin + length == active.num_to_read:
                told.row[i] = _row(active)
        table = page_tables([segment.active.pages for segment in segments], n, config)
        return program, dataclasses.replace(told, start=start, count=count, table=table)

    def _groups(self, entering: Sequence[ActiveRequest]) -> list[Sequence[ActiveRequest]]:
        """Requests in groups that enter with one program."""
        most = self.programs.most_entries
        return [entering[i : i + most] for i in range(0, len(entering), most)]

    def _entries(self, entering: Sequence[tuple[int, Request]]) -> Entries:
        """Rows and the requests that enter them, at most as many as one program takes."""
        return Entries.of(self._config, self._builder.vocab_size, self.programs.most_entries, entering)

    def _rows(self, plan: Plan, bucket: int) -> Call:
        rows = [_row(active) for active in plan.decoding]
        return Call.of(self._config, bucket, rows, [active.pages for active in plan.decoding], plan.rounds)

    def _call(self, plan: Plan, way: Way) -> tuple[PackedProgram, Call]:
        bucket = self._config.bucket(len(plan.decoding))
        if plan.needs_processing:
            return self.programs.processing_decode[bucket], self._rows(plan, bucket)
        return self.programs.decode[bucket, drafts_of(way), budget_of(way)], self._rows(plan, bucket)

    def _catch_up(self, plan: Plan) -> tuple[PackedProgram, Call]:
        return self.programs.catch_up, self._rows(plan, self._config.max_batch)

    def _swap_out(self, move: Move):
        parts = []
        for pages in self._moved_at_once(move.pages):
            saved = self._send(self.programs.save, np.int32(move.row), pages)
            parts.append(self._parts.part(moved(saved, "device", "pinned_host")))
            self._lead("keep", parts[-1].key)
        self._lead("drop", self._parts.dropped())
        move.active.saved = parts

    def _swap_in(self, move: Move):
        for pages, part in zip(self._moved_at_once(move.pages), move.active.saved, strict=True):
            self._lead("fetch", part.key)
            self._send(self.programs.restore, np.int32(move.row), pages, moved(part.saved, "pinned_host", "device"))
        move.active.saved, move.active.num_saved_pages = None, 0

    def _moved_at_once(self, pages: Sequence[int]) -> list[np.ndarray]:
        """The pages in groups that one program moves, the last one padded with the null page. There is at least one."""
        size = self.programs.most_moved
        groups = [pages[i : i + size] for i in range(0, max(len(pages), 1), size)]
        return [np.array([*group, *[0] * (size - len(group))], np.int32) for group in groups]

    def _needed(self, plan: Plan, way: Way) -> Iterator[tuple[Program, tuple]]:
        """The programs that a plan needs, with arguments that do nothing to an idle batch."""
        packed = [self._pass(plan.segments)[0]] if plan.segments else []
        packed += [self.programs.admit] if plan.entering else []
        if plan.decoding:
            packed.append(self._call(plan, way)[0])
            behind = max(active.largest_K for active in plan.decoding) > drafts_of(way)
            packed += [self.programs.catch_up] if behind else []
        yield from ((program, (program.idle,)) for program in packed)
        if plan.drafting:
            draft = self.programs.draft[self._config.bucket(len(plan.drafting))]
            yield draft, (draft.idle,)
        movers = self.programs.save, self.programs.restore
        if (plan.leaving or plan.returning) and not all(program.compiled for program in movers):
            yield from self.movers()  # which JAX keeps memory for, each time

    def _every_program(self) -> Iterator[tuple[Program, tuple]]:
        """All programs that may be needed, with arguments that do nothing to an idle batch."""
        left_out = list(self.programs.judge.values())  # they take what others return
        left_out += () if available() else self.programs.draft.values()
        packed = [one for one in self.programs if isinstance(one, PackedProgram) and one not in left_out]
        if len(self.draft_lengths) == 1:
            packed.remove(self.programs.catch_up)
        yield from ((program, (program.idle,)) for program in packed)
        yield from self.movers()

    def _compile_judges(self, buckets: Sequence[int], threads: int | None = None):
        """Compile the programs that judge what those of ``draft`` propose, which have been compiled. What these propose on
        an idle batch shows its shapes; tracing them for that would take long."""
        missing = []
        for draft, judge in ((self.programs.draft[b], self.programs.judge[b]) for b in buckets):
            if not judge.compiled:
                missing.append((judge, (self._send(draft, draft.idle), judge.idle)))
        self._compile(missing, threads)

    def _compile(self, programs: Sequence[tuple[Program, tuple]], threads: int | None = None):
        """Compile programs for the arguments that they get beside weights and state. All processes of a group do it at a
        time, since on GPUs they compare what they find."""
        self._lead("compile", [self.programs.place(program) for program, _ in programs], threads)
        # Each send replaces the state, so it is looked at only now.
        missing = [(program, self._with_weights(program, args)) for program, args in programs]
        compile_all(missing, threads, self.is_wanted)

    def serving(self):
        """Let the processes that follow this one know that everything is compiled, and that requests are taken now."""
        self._lead("serving")

    def _lead(self, *message: Any):
        """Tell the processes that follow this one, if there are any."""
        if isinstance(self.group, Leader):
            self.group.tell(*message)

    def movers(self) -> Iterator[tuple[Program, tuple]]:
        """The programs that move requests to host memory and back, with arguments that change nothing."""
        row, pages = np.int32(0), np.zeros(self.programs.most_moved, np.int32)
        yield self.programs.save, (row, pages)
        saved = jax.eval_shape(save, self.state, row, pages)

        def make():
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), saved)

        nothing = make() if self.spread is None else self.spread.made(make, self.spread.saved)
        yield self.programs.restore, (np.int32(self._config.num_rows), pages, nothing)

    def _with_weights(self, program: Program, args: Sequence) -> tuple:
        if program is self.programs.admit:
            return of_rows(self.state), *args
        return *((self.leaves,) if program.donate == WEIGHTS_THEN_STATE else ()), self.state, *args

    def _tell(self, program: PackedProgram, what: Any) -> Any:
        """Send a program that is told ``what`` to do; returns what it gives beside the state."""
        return self._send(program, program.packing.pack(what))

    def _send(self, program: Program, *args) -> Any:
        """Send a program, and keep the state that it gives back; returns what else it gives."""
        on_host = [arg for arg in args if isinstance(arg, np.ndarray | np.generic)]
        args = self._with_weights(program, args)
        program.compile(*args)
        if self.group is not None:
            self._lead("send", self.programs.place(program), on_host)
        new, other = program(*args)
        self.state = dataclasses.replace(self.state, **new) if program is self.programs.admit else new
        return other

    def _intact(self) -> bool:
        leaves = jax.tree.leaves(getattr(self, "state", None))
        if not leaves or any(leaf.is_deleted() for leaf in leaves):
            return False
        try:
            jax.block_until_ready(leaves)
        except jax.errors.JaxRuntimeError:  # of a program that computed it
            return False
        return True


class Sent(NamedTuple):
    """What came of sending a plan.

    Attributes:
      logs: of its rounds, on the way to the host, for which ``Runner.read`` waits; None if it has none.
      judged: of its constrained requests, likewise.
      failures: constrained requests whose constraint raised, and what it raised.
    """

    logs: CallLogs | None
    judged: Judged | None
    failures: list[Failure]


def _row(active: ActiveRequest) -> int:
    assert active.row is not None
    return active.row
