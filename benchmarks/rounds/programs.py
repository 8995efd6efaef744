"""The programs that are timed, on random weights and at set lengths: rounds of a batch that is being decoded, and verify
passes of the target."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.rounds.experts_hit import experts_hit, experts_hit_evenly
from benchmarks.rounds.floors import draft_passes, floor, target_pass
from benchmarks.rounds.hlo import launched
from benchmarks.rounds.profile import kernel_times, report
from benchmarks.shapes import Pair, head_for, random_module, random_shards
from jspec.config import EngineConfig, ModelConfig, Shards, Speculation
from jspec.drafting.methods import drafter_for
from jspec.engine.multihost.shard_map import ProgramSharding
from jspec.engine.runner.compile import decode_options
from jspec.engine.runner.state import LIVE, init_state
from jspec.engine.runner.step import DecodeStep
from jspec.engine.runner.step_io import RoundLog
from jspec.models.flatten import flatten
from jspec.models.kv_cache import PagedView, init_pool
from jspec.models.params import DTYPES
from jspec.models.sharding import mesh_of, on_every_device
from jspec.pallas.collectives.peers import room_for
from jspec.pallas.collectives.workspace import Exchange, Workspace, are_lost
from jspec.sampling.distribution import Warp
from jspec.sampling.stops import forbid_early_stops
from jspec.sampling.synthetic import rule_of
from jspec.sampling.verify import RULES

PAGE = 64


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Rounds of a batch that has been decoding for a while.

    Attributes:
      method: how drafts are made, as ``shapes.head_for`` names it or ``draft_model``; None for plain decoding.
      K: drafts per round, 0 without a method.
      batch: number of rows, all of them live from the first round to the last.
      start: committed tokens of each row before the first round.
      new: tokens that a row gets on average, in whole rounds.
      acceptance: synthetic acceptance of every draft; a tuple has requests of so many kinds take turns, each with one.
      draft_sampling: ``sample`` or ``argmax``; requests are sampled at temperature 1 either way.
      verify: the rule.
      quantization: of the target's weights.
      draft_quantization: of the weights of the draft model or draft head.
      draft_vocabulary: of how many tokens the draft has logits; None for those that ``shapes`` gives it.
      budget: how many tokens the target reads in a round, of all rows together; None for every draft.
      draft_in_shards: whether a draft model is split over the devices as the target is; otherwise each has all of it.
    """

    method: str | None
    K: int
    batch: int
    start: int
    new: int
    acceptance: float | tuple[float, ...] = 0.7
    draft_sampling: Any = "sample"
    verify: Any = "rejection"
    quantization: Any = None
    draft_quantization: Any = None
    draft_vocabulary: int | None = None
    budget: int | None = None
    draft_in_shards: bool = False

    def __str__(self) -> str:
        weights = f"{self.quantization} weights, " if self.quantization else ""
        where = f"{weights}batch {self.batch}, {self.start:,} + {self.new:,} tokens"
        where += f", {self.budget} of them read in a round" if self.budget else ""
        if self.method is None:
            return f"plain decoding, {where}"
        drafts = f"{self.draft_sampling} drafts, " if self.draft_sampling != "sample" else ""
        drafts = f"{self.draft_quantization} drafter, {drafts}" if self.draft_quantization else drafts
        drafts = f"drafts in shards, {drafts}" if self.draft_in_shards else drafts
        drafts = f"{self.draft_vocabulary:,} draft tokens, {drafts}" if self.draft_vocabulary else drafts
        rates = " / ".join(f"{rate:g}" for rate in self.kinds)
        return f"{self.method}, K = {self.K}, {drafts}{where}; synthetic acceptance {rates}"

    @property
    def kinds(self) -> tuple[float, ...]:
        """The acceptance of each kind of request."""
        return self.acceptance if isinstance(self.acceptance, tuple) else (self.acceptance,)

    @property
    def rounds(self) -> int:
        """Rounds until ``new`` tokens are expected."""
        return max(1, round(self.new / max(sum(rate**i for i in range(self.K + 1)) for rate in self.kinds)))

    @property
    def capacity(self) -> int:
        """S, the cache slots of a row. A row whose drafts are accepted more often than most still has room: over many
        rounds none gets that many more tokens."""
        return _whole_pages(self.start + self.new + max(self.new // 2, 5 * (self.K + 1)))

    @property
    def speculation(self) -> Speculation:
        return Speculation(
            max(self.K, 1),
            self.verify,
            self.draft_sampling,
            synthetic_acceptance=tuple((rate,) * self.K for rate in self.kinds) if self.K else None,
        )

    def engine_config(self, dtype: str) -> EngineConfig:
        return EngineConfig(max_batch=self.batch, max_len=self.capacity, dtype=dtype, page_size=PAGE)


@dataclasses.dataclass(frozen=True)
class Forward:
    """Verify passes of the target over ``width`` query tokens in each of ``batch`` rows. Each row has a cache of
    ``capacity`` slots, of which ``live`` are in use; the query tokens are the last of these."""

    batch: int
    width: int
    live: int
    capacity: int
    passes: int
    quantization: Any = None  # of the target's weights

    def __str__(self) -> str:
        weights = f"{self.quantization} weights, " if self.quantization else ""
        where = f"{weights}{self.live:,} live slots of {self.capacity:,}"
        return f"verify pass, {self.batch} x {self.width} query tokens, {where}"


@dataclasses.dataclass(frozen=True)
class Timed:
    """What was measured of one program, and its floor.

    Attributes:
      seconds: of a round, the median over calls.
      floor: seconds of a round at the bandwidth that was measured.
      kernels: launches of a round.
      length: live slots of a row, on average.
      tokens: tokens that a round gave a row, on average.
      experts: of how many experts a layer of the target read the weights, on average; None if it has none. In shards it
        is not counted: as many as tokens hit that choose evenly.
    """

    seconds: float
    floor: float
    kernels: int
    length: float
    tokens: float
    experts: float | None = None


class Program(NamedTuple):
    """What is timed.

    Attributes:
      function: ``(leaves, state)``, to be compiled with its state donated.
      leaves: the weights.
      fresh: makes a state.
      options: for the compiler.
    """

    function: Callable
    leaves: Any
    fresh: Callable
    options: dict[str, str | int]


def decoding_program(
    target, module, draft, config: EngineConfig, what: Decoding, exchange: Callable[[], Exchange | None] = lambda: None
) -> Program:
    """Rounds as the engine runs them.

    Args:
      target, module: modules of target and draft; they may have shapes in place of arrays.
      draft: the configuration of the draft, None for plain decoding.
      config: of the engine.
      what: the rounds.
      exchange: makes what the sums over GPUs are made by; None leaves them to XLA.
    """
    make, spread = drafter_for(draft, target.config, what.speculation), ProgramSharding.of(target, module)
    rule = rule_of(what.speculation) if what.K else RULES["match"]
    (of, merge_of), (by, merge_by) = flatten(target), flatten(module)

    def rounds(leaves, state, peers=None):
        model, draft_model = merge_of(leaves[0]), merge_by(leaves[1])
        for one in (model, draft_model):
            if peers is not None and getattr(one, "shards", None) is not None:
                one.peers = peers
        drafter = make(model, draft_model)
        return DecodeStep(model, drafter, rule, what.K + 1, budget=what.budget).decode(state, what.rounds)

    def begun():
        state = init_state(
            config, target, make(target, module), DTYPES[config.dtype], estimates=what.budget is not None
        )
        return _in_flight(state, config, what.start)

    options = decode_options(of, what.budget or what.batch * (what.K + 1))
    if spread is None:
        return Program(rounds, (of, by), lambda: _with_noise(begun()), options)
    on_devices = spread.creating(begun)

    def fresh():
        return dataclasses.replace(_with_noise(on_devices()), exchange=exchange())

    return Program(spread.model_program(rounds), (of, by), fresh, options)


def forward_program(target, dtype: str, what: Forward) -> Program:
    """Verify passes of the target as a decode step makes them, logits included, one after another over the same
    slots."""
    leaves, merge = flatten(target)
    B, M = what.batch, what.capacity // PAGE
    positions = _last_positions(what)
    no_stops = jnp.full((B, 1), -1, jnp.int32), jnp.zeros(B, jnp.int32)

    def one(leaves, state):
        tokens, cache, _ = state
        model, view = merge(leaves), PagedView(_tables(B, M), positions, jnp.ones(positions.shape, bool))
        hidden, cache = model(tokens, positions, cache, view)
        logits = forbid_early_stops(model.logits(hidden), positions + 1, *no_stops)
        # The next pass waits for this one: its tokens are the same, unless a logit is what no logit is.
        return tokens + (logits[:, :1, 0] > 1e38).astype(jnp.int32), cache, logits

    def passes(leaves, state):
        return jax.lax.fori_loop(0, what.passes, lambda _, state: one(leaves, state), state), None

    def fresh():
        tokens = jax.random.randint(jax.random.key(3), (B, what.width), 0, target.config.vocab_size, jnp.int32)
        cache = _random(init_pool(target.cache_shape(), 1 + B * M, PAGE, DTYPES[dtype]))
        return tokens, cache, jnp.zeros((B, what.width, target.config.vocab_size), DTYPES[dtype])

    return Program(passes, leaves, fresh, decode_options(leaves, B * what.width))


class Bench:
    """Random weights of one shape, made once, and the times of the programs that ran on them.

    Args:
      pair: the target and the model that drafts for it.
      dtype: of weights and cache.
      bandwidth: bytes per second, for floors.
      repeats: timed calls of each program, after one that is not.
      profiled: whether to print, too, which kernels take the time of a round.
      shards: of the target, on so many devices, each of which has all of the draft; None for one device.
      packets: whether these devices add up by packets (``jspec.pallas.collectives``).
    """

    def __init__(
        self,
        pair: Pair,
        dtype: str,
        bandwidth: float,
        repeats: int,
        profiled: bool = False,
        shards: Shards | None = None,
        packets: bool = False,
    ):
        self.pair, self.dtype, self.bandwidth, self.repeats = pair, dtype, bandwidth, repeats
        self.profiled, self.shards = profiled, shards
        self.packets, self._workspace = packets, None
        self._timed: dict[tuple[Decoding | Forward, bool], Timed] = {}

    @functools.cache  # noqa: B019 (a bench lives as long as the program)
    def target_in(self, quantization: str | None):
        """The target with weights in this format, None for those of ``dtype``. With blocks of FP8 the output head is not
        quantised, as in published checkpoints."""
        in_blocks = quantization == "fp8_block"
        config = dataclasses.replace(self.pair.target, quantization=quantization, quantized_head=not in_blocks)
        if self.shards is None:
            return random_module(config, dtype=self.dtype)
        return random_shards(config, self.shards, mesh_of(self.shards.count, self.shards.axis), self.dtype)

    @property
    def target(self):
        return self.target_in(None)

    @functools.cache  # noqa: B019
    def draft(
        self,
        method: str | None,
        quantization: Any = None,
        vocabulary: int | None = None,
        in_shards: bool = False,
    ):
        """(configuration, module) of the draft that a method uses, with weights in this format and logits of so many tokens,
        on each device or in shards; (None, None) for plain decoding."""
        if method is None:
            return None, None
        config = self.pair.draft if method == "draft_model" else head_for(self.pair.target, method)
        config = config if vocabulary is None else config.with_draft_vocabulary(vocabulary)
        config = config if quantization is None else config.with_quantization(quantization)
        shards = self.shards
        if in_shards:
            assert shards is not None
            assert isinstance(config, ModelConfig)
            return config, random_shards(config, shards, mesh_of(shards.count, shards.axis), self.dtype, 1)
        module = random_module(config, 1, self.dtype, drafts=True)
        return config, module if shards is None else on_every_device(module, mesh_of(shards.count, shards.axis))

    def time(self, what: Decoding | Forward) -> Timed:
        """The times of a program, which is compiled and run the first time that it is asked for."""
        key = what, self.packets
        if key not in self._timed:
            self._timed[key] = self._decoding(what) if isinstance(what, Decoding) else self._forward(what)
        return self._timed[key]

    def _decoding(self, what: Decoding) -> Timed:
        config, module = self.draft(what.method, what.draft_quantization, what.draft_vocabulary, what.draft_in_shards)
        target = self.target_in(what.quantization)
        program = decoding_program(target, module, config, what.engine_config(self.dtype), what, self._exchange)
        seconds, kernels, (state, logs) = self._run(program, what.rounds)
        if logs.epochs is not None and are_lost(logs.epochs):
            raise RuntimeError(f"a GPU waited for the other one in vain in {what}")
        log = RoundLog.unpacked(logs)
        if np.any(log.outcome != LIVE):
            raise RuntimeError(f"a row ended before the last round of {what}: its round would be too cheap")
        before = what.start + np.cumsum(log.count, axis=0) - log.count
        length, tokens = float(np.mean(before)), float(np.mean(log.count))
        if self.shards is None:
            hit = experts_hit(target, *_next_pass(state, what.K, target.config.vocab_size))
        else:
            hit = experts_hit_evenly(self.pair.target, what.batch * (what.K + 1))
        width = what.budget / what.batch if what.budget else what.K + 1
        least = floor([target_pass(target, what.batch, width, length, hit)], self.bandwidth)
        least /= 1 if self.shards is None else self.shards.count  # every device reads and multiplies its own part
        if what.K:
            of_draft = floor(draft_passes(target, module, what.K, what.batch, length), self.bandwidth)
            least += of_draft / (self.shards.count if what.draft_in_shards and self.shards else 1)
        return Timed(seconds, least, kernels, length, tokens, hit)

    def _exchange(self) -> Exchange | None:
        """For the next call, which counts its epochs from 1."""
        if not self.packets:
            return None
        if self._workspace is None:
            shards = self.shards
            assert shards is not None
            room = room_for(self.pair.target.hidden_size, DTYPES[self.dtype], shards.count)
            self._workspace = Workspace.create(mesh_of(shards.count, shards.axis), room)
        else:
            self._workspace = self._workspace.renewed()
        return self._workspace.exchange()

    def _forward(self, what: Forward) -> Timed:
        target = self.target_in(what.quantization)
        seconds, kernels, (state, _) = self._run(forward_program(target, self.dtype, what), what.passes)
        hit = experts_hit(target, state[0], _last_positions(what), state[1], _tables(what.batch, what.capacity // PAGE))
        passes = [target_pass(target, what.batch, what.width, what.live, hit)]
        return Timed(seconds, floor(passes, self.bandwidth), kernels, what.live, 0.0, hit)

    def _run(self, program: Program, rounds: int):
        """Seconds and launches of a round, and what the last call returned, logs on the host."""
        make = program.fresh  # not compiled as a whole: it makes an array for every layer
        function = jax.jit(program.function, donate_argnums=1, compiler_options=program.options)
        example = jax.eval_shape(make) if self.shards is None else make()  # which says on which devices its arrays lie
        compiled = function.lower(program.leaves, example).compile()
        del example
        seconds, state, log = [], None, None
        for _ in range(self.repeats + 1):
            state = jax.block_until_ready(make())
            started = time.perf_counter()
            state, log = jax.block_until_ready(compiled(program.leaves, state))
            seconds.append((time.perf_counter() - started) / rounds)
        if self.profiled:
            last = make()
            print(report(kernel_times(lambda: compiled(program.leaves, last)), rounds), flush=True)
        kernels = len(launched(compiled.as_text() or "", loop=True))
        return statistics.median(seconds[1:]), kernels, (state, jax.device_get(log))


def _in_flight(state, config: EngineConfig, length: int):
    """A state in which every row is decoding a text of ``length`` tokens at temperature 1."""
    B = config.max_batch
    every = lambda value, dtype=jnp.int32: jnp.full(B, value, dtype)  # noqa: E731
    request = dataclasses.replace(
        state.request,
        length=every(length),
        limit=every(config.max_len),
        key_data=jnp.stack([jnp.zeros(B, jnp.uint32), jnp.arange(B, dtype=jnp.uint32)], axis=1),
        table=_tables(B, config.pages_per_row),
        warp=Warp(every(1, jnp.float32), every(0), every(1, jnp.float32), every(0, jnp.float32)),
    )
    return dataclasses.replace(state, outcome=every(LIVE), request=request, previous=every(length - 1))


def _with_noise(state):
    """The state with random numbers in its caches and features."""
    cache, features, draft = _random((state.cache, state.features, state.draft))
    return dataclasses.replace(state, cache=cache, features=features, draft=draft)


def _next_pass(state, K: int, vocab_size: int):
    """Tokens, positions, cache and tables of a verify pass that might come next, with random drafts."""
    length = state.request.length[:, None]
    newest = jnp.take_along_axis(state.tokens, length - 1, axis=1)
    drafts = jax.random.randint(jax.random.key(3), (len(length), K), 0, vocab_size, jnp.int32)
    positions = length - 1 + jnp.arange(K + 1, dtype=jnp.int32)[None, :]
    return jnp.concatenate([newest, drafts], axis=1), positions, state.cache, state.request.table


def _last_positions(what: Forward):
    """int32 ``[B, width]``."""
    positions = what.live - what.width + jnp.arange(what.width, dtype=jnp.int32)
    return jnp.broadcast_to(positions, (what.batch, what.width))


def _random(tree):
    """The tree with random numbers in its floating-point arrays: computing with zeros would take less power than with real
    ones."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(2), len(leaves) + 1)

    def made(leaf, key):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        sharding = None if isinstance(leaf, jax.core.Tracer) else leaf.sharding
        return _normal(leaf.shape, leaf.dtype, sharding)(key)

    return structure.unflatten(map(made, leaves, keys))


@functools.cache  # one program for the caches of all layers: a program that makes all of them compiles for minutes
def _normal(shape: tuple[int, ...], dtype, sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda key: jax.random.normal(key, shape, dtype), out_shardings=sharding)


def _tables(B: int, M: int):
    """Page tables in which every row has pages of its own, int32 ``[B, M]``."""
    return 1 + jnp.arange(B * M, dtype=jnp.int32).reshape(B, M)


def _whole_pages(slots: int) -> int:
    return -(-slots // PAGE) * PAGE
