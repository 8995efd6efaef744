"""The programs that an engine runs on the device, in a table."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jspec.config import TreeShape
from jspec.drafting.base import FixedDrafts
from jspec.engine.adaptive.cost_table import RoundShape, budget_of, drafts_of
from jspec.engine.request import Request
from jspec.engine.runner.compile import Program, decode_options, one_order_options
from jspec.engine.runner.host_packing import HostPacking
from jspec.engine.runner.saved import restore, restore_states, save, save_states
from jspec.engine.runner.state import Admission, AdmitInputs, DecodeState, admit, of_rows
from jspec.engine.runner.step_builder import Leaves, StepBuilder
from jspec.engine.runner.step_io import DecodeRows, GrammarInputs, VerifyInputs, empty_prefill
from jspec.models.one_order import one_order
from jspec.sampling.params import SamplingParams

MOST_ADMITTED = 8  # requests that one program admits
MOST_MOVED = 16  # pages that one program moves between device and host


@dataclasses.dataclass(frozen=True)
class Operands:
    """What a program takes in front of its inputs, and where its first result goes.

    Attributes:
      of: (leaves, state) -> these arguments.
      donate: the place among them of what the first result replaces; None for a program with one result, which replaces
        nothing.
      replaced: (state, first result) -> the new state.
    """

    of: Callable[[Leaves, DecodeState], tuple]
    donate: int | None
    replaced: Callable[[DecodeState, Any], DecodeState] = lambda state, new: new


WEIGHTS_AND_STATE = Operands(lambda leaves, state: (leaves, state), donate=1)
STATE = Operands(lambda leaves, state: (state,), donate=0)
ROWS = Operands(lambda leaves, state: (of_rows(state),), 0, lambda state, rows: dataclasses.replace(state, **rows))
OUTCOME = Operands(lambda leaves, state: (state.outcome,), donate=None)


@dataclasses.dataclass(frozen=True)
class ProgramSpec:
    """A line of the table of programs.

    Attributes:
      name: what messages and profiles call it.
      function: of its operands, of results of other programs, and of its inputs, over all devices.
      operands: what it takes of weights and state.
      example: inputs that leave an idle batch as it is, to be packed into one array; None if they are not packed.
      takes: the results of other programs that come before its inputs, by what these ``give``.
      gives: what programs that take its result know it as; None if there are none.
      options: XLA's.
    """

    name: str
    function: Callable
    operands: Operands
    example: Any = None
    takes: tuple[Any, ...] = ()
    gives: Any = None
    options: dict[str, str | int] | None = None


class EngineProgram(Program):
    """A program of the table; ``spec`` is its line there."""

    def __init__(self, spec: ProgramSpec, function: Callable):
        super().__init__(function, spec.operands.donate, spec.options, spec.name)
        self.spec = spec


class PackedProgram(EngineProgram):
    """A program whose inputs are one packed array on the host.

    Attributes:
      packing: how the inputs lie in the array.
      idle: the spec's example, packed.
    """

    def __init__(self, spec: ProgramSpec):
        self.packing = packing = HostPacking.of(spec.example)
        self.idle = packing.pack(spec.example)
        super().__init__(spec, lambda *args: spec.function(*args[:-1], packing.unpack(args[-1])))


class Programs:
    """Every program of an engine, as the functions below have them in a table.

    Attributes:
      prefill: by the number of chunks.
      decode: by (b, round shape): rounds of b rows. No row may have processors or want log-probabilities.
      processing_decode: by b: the same with up to the most drafts, for rows that may.
      draft, finish: by (b, processing): without ``processing``, as for ``decode``.
      verify_pass: by b.
      grammar: by the number of rows that a grammar restricts.
      save_states, restore_states: do nothing where neither target nor drafter has recurrent states.
      most_admitted: how many requests ``admit`` takes.
      most_moved: how many pages ``save`` and ``restore`` move.
    """

    prefill: dict[int, PackedProgram]
    prefill_with_logprobs: PackedProgram
    admit: PackedProgram
    catch_up: PackedProgram
    save: EngineProgram
    restore: EngineProgram
    save_states: EngineProgram
    restore_states: EngineProgram
    decode: dict[tuple[int, RoundShape], PackedProgram]
    processing_decode: dict[int, PackedProgram]
    draft: dict[tuple[int, bool], PackedProgram]
    verify_pass: dict[int, PackedProgram]
    grammar: dict[int, PackedProgram]
    finish: dict[tuple[int, bool], PackedProgram]

    def __init__(self, builder: StepBuilder, target_leaves: Sequence[jax.Array]):
        self.most_admitted = min(MOST_ADMITTED, builder.config.max_batch)
        self.most_moved = min(MOST_MOVED, builder.config.pages_per_row)
        by_kind: dict[str, dict[Any, EngineProgram]] = {}
        ordered = one_order(builder.config.one_order)
        for kind, key, spec in (*_single(builder), *_of_rounds(builder, target_leaves)):
            options = (spec.options or {}) | one_order_options(builder.config.one_order)
            spec = dataclasses.replace(spec, function=ordered(spec.function), options=options)
            program = EngineProgram(spec, spec.function) if spec.example is None else PackedProgram(spec)
            by_kind.setdefault(kind, {})[key] = program
        for kind, programs in by_kind.items():
            setattr(self, kind, programs.get(None, programs))  # one program, or many by their keys
        every = itertools.chain(*(programs.values() for programs in by_kind.values()))
        self._indices = {program: index for index, program in enumerate(every)}

    def index(self, program: EngineProgram) -> int:
        """The index of a program among all, which is the same in every process."""
        return self._indices[program]

    def __iter__(self) -> Iterator[EngineProgram]:
        return iter(self._indices)


def _single(builder: StepBuilder) -> Iterator[tuple[str, Any, ProgramSpec]]:
    """The table of prefills, admission and copies: attributes of ``Programs``, keys in them if there are several, specs."""
    config, sharding = builder.config, builder.sharding
    prefill = builder.program(lambda steps, state, inputs: (steps(builder.most).prefill(state, inputs), None))
    with_logprobs = builder.program(lambda steps, *args: steps(builder.most).prefill_with_logprobs(*args))
    for n in config.chunk_buckets:
        chunks = empty_prefill(config, n)
        yield "prefill", n, ProgramSpec(f"prefill_{n}x{config.chunk}", prefill, WEIGHTS_AND_STATE, chunks)
    no_request = Admission(config.num_rows, Request(0, [0], SamplingParams(), np.zeros(2, np.uint32)), [0])
    admission = AdmitInputs.of(config, builder.vocab_size, min(MOST_ADMITTED, config.max_batch), [no_request])
    chunks, call = empty_prefill(config, config.logprob_chunks), DecodeRows.of(config, config.max_batch, [], [], 1)
    for name, function, operands, example in (
        ("prefill_with_logprobs", with_logprobs, WEIGHTS_AND_STATE, chunks),
        ("admit", builder.replicated(lambda rows, inputs: (admit(rows, inputs), None)), ROWS, admission),
        ("catch_up", builder.program(builder.catch_up), WEIGHTS_AND_STATE, call),
    ):
        yield name, None, ProgramSpec(name, function, operands, example)
    for name, function in (
        ("save", lambda state, *args: (state, save(state, *args))),
        ("restore", lambda *args: (restore(*args), None)),
        ("save_states", lambda state, *args: (state, save_states(state, *args))),
        ("restore_states", lambda *args: (restore_states(*args), None)),
    ):
        yield name, None, ProgramSpec(name, sharding.copy_program(name, function) if sharding else function, STATE)


def _of_rounds(builder: StepBuilder, target_leaves: Sequence[jax.Array]) -> Iterator[tuple[str, Any, ProgramSpec]]:
    """The table of rounds and of their parts."""
    config, width, suffixes = builder.config, builder.width(builder.usual), ((False, ""), (True, "_processing"))

    def on_model(name: str, function: Callable, example: Any, tokens: int, **how) -> ProgramSpec:
        """A program in which the target reads ``tokens`` tokens of all rows at a time."""
        options = decode_options(target_leaves, tokens)
        return ProgramSpec(name, builder.program(function), WEIGHTS_AND_STATE, example, options=options, **how)

    for b in config.batch_buckets:
        call, tokens, drafts, verified = DecodeRows.of(config, b, [], [], 1), b * width, ("drafts", b), ("verified", b)
        for shape in builder.round_shapes(b):
            rounds, read = functools.partial(builder.rounds, shape=shape), budget_of(shape) or b * builder.width(shape)
            yield "decode", (b, shape), on_model(f"decode_{b}_rows_{_name_of(shape)}", rounds, call, read)
        yield "processing_decode", b, on_model(f"decode_{b}_rows_processing", builder.processing_rounds, call, tokens)
        for processing, suffix in suffixes:
            draft = functools.partial(builder.draft, processing=processing)
            yield "draft", (b, processing), on_model(f"draft_{b}_rows{suffix}", draft, call, tokens, gives=drafts)
        inputs, name = VerifyInputs(call, FixedDrafts.of(b, builder.most)), f"verify_pass_{b}_rows"
        yield "verify_pass", b, on_model(name, builder.verify_pass, inputs, tokens, takes=(drafts,), gives=verified)
        allowed = GrammarInputs.empty(b, builder.restricted, builder.vocab_size)
        grammar = builder.replicated(builder.grammar)
        yield "grammar", b, ProgramSpec(f"grammar_{b}_rows", grammar, OUTCOME, allowed, gives="allowed")
        for processing, suffix in suffixes:
            name, finish = f"finish_{b}_rows{suffix}", functools.partial(builder.finish, processing=processing)
            yield "finish", (b, processing), on_model(name, finish, call, tokens, takes=(verified, "allowed"))


def _name_of(shape: RoundShape) -> str:
    """A round shape in the name of a program."""
    if isinstance(shape, TreeShape):
        return "tree_of_" + "_".join(map(str, dataclasses.astuple(shape)))
    return f"{drafts_of(shape)}_drafts" + ("" if budget_of(shape) is None else f"_{budget_of(shape)}_tokens")
