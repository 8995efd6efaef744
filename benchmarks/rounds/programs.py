"""The programs that are timed, on random weights and at set lengths: rounds of a batch that is being decoded, and verify
passes of the target."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.rounds.experts_hit import all_rows
from benchmarks.rounds.synthetic import rule_of
from jspec.config import EngineConfig, ModelConfig, Speculation, TreeShape
from jspec.drafting.methods import drafter_for
from jspec.drafting.recurrent import DraftRows
from jspec.engine.runner.compile import decode_options
from jspec.engine.runner.shard_map import ProgramSharding
from jspec.engine.runner.state import LIVE, init_state
from jspec.engine.runner.step import DecodeStep
from jspec.models.cache_pools import KVRounding, init_cache
from jspec.models.flatten import copied, flatten
from jspec.models.kv_cache import PagedView
from jspec.models.params import DTYPES
from jspec.models.w8a8 import with_quantized_activations
from jspec.pallas.attention.fp8 import STORED, KVScales, encode
from jspec.pallas.collectives.workspace import Exchange
from jspec.sampling.distribution import Warp
from jspec.sampling.stops import forbid_early_stops
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
      kv_cache: how the target rounds keys and values that it caches, ``fp8`` or ``fp8_per_token_head``; None for not at
        all.
      activations: whether the target rounds the inputs of its maps to the type of its weights, ``int8`` or ``fp8``.
      tree: of the drafts, K deep; then nothing is accepted but by the target.
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
    kv_cache: str | None = None
    activations: bool = False
    tree: TreeShape | None = None

    def __str__(self) -> str:
        weights = f"{self.quantization} weights, " if self.quantization else ""
        weights += "rounded activations, " if self.activations else ""
        weights += f"{self.kv_cache} cache, " if self.kv_cache else ""
        where = f"{weights}batch {self.batch}, {self.start:,} + {self.new:,} tokens"
        where += f", {self.budget} of them read in a round" if self.budget else ""
        if self.method is None:
            return f"plain decoding, {where}"
        drafts = f"{self.draft_sampling} drafts, " if self.draft_sampling != "sample" else ""
        drafts = f"{self.draft_quantization} drafter, {drafts}" if self.draft_quantization else drafts
        drafts = f"drafts in shards, {drafts}" if self.draft_in_shards else drafts
        drafts = f"{self.draft_vocabulary:,} draft tokens, {drafts}" if self.draft_vocabulary else drafts
        if self.tree is not None:
            shape = self.tree
            return f"{self.method}, tree of {shape.nodes} nodes, depth {shape.depth}, branch {shape.branch}, {where}"
        rates = " / ".join(f"{rate:g}" for rate in self.kinds)
        return f"{self.method}, K = {self.K}, {drafts}{where}; synthetic acceptance {rates}"

    @property
    def kinds(self) -> tuple[float, ...]:
        """The acceptance of each kind of request."""
        return self.acceptance if isinstance(self.acceptance, tuple) else (self.acceptance,)

    @property
    def rounds(self) -> int:
        """Rounds until ``new`` tokens are expected."""
        if self.tree is not None:
            return self.new // 4  # so many tokens a round are not more than trees give
        return max(1, round(self.new / max(sum(rate**i for i in range(self.K + 1)) for rate in self.kinds)))

    @property
    def width(self) -> int:
        """Query tokens of a row in a round."""
        return self.K + 1 if self.tree is None else self.tree.nodes

    @property
    def capacity(self) -> int:
        """S, the cache slots of a row. A row whose drafts are accepted more often than most still has room: over many
        rounds none gets that many more tokens."""
        beyond = 0 if self.tree is None else self.tree.nodes
        return _whole_pages(self.start + self.new + max(self.new // 2, 5 * (self.K + 1)) + beyond)

    @property
    def speculation(self) -> Speculation:
        if self.tree is not None:
            return Speculation(tree=self.tree)
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
    kv_cache: str | None = None  # as for ``Decoding``
    activations: bool = False  # as for ``Decoding``

    def __str__(self) -> str:
        weights = f"{self.quantization} weights, " if self.quantization else ""
        weights += "rounded activations, " if self.activations else ""
        weights += f"{self.kv_cache} cache, " if self.kv_cache else ""
        where = f"{weights}{self.live:,} live slots of {self.capacity:,}"
        return f"verify pass, {self.batch} x {self.width} query tokens, {where}"


class Program(NamedTuple):
    """What is timed.

    Attributes:
      function: ``(leaves, state)``, to be compiled with its state donated.
      leaves: the weights.
      fresh: makes a state.
      options: for the compiler.
      repeats: whether a call does the same again with the state that the last one returned. The arrays of a new one lie
        elsewhere, and XLA updates its CUDA graphs before it runs them, which calls of an engine need not pay.
    """

    function: Callable
    leaves: Any
    fresh: Callable
    options: dict[str, str | int]
    repeats: bool = False


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
    rule = rule_of(what.speculation) if what.K and what.tree is None else RULES["match"]
    (of, merge_of), (by, merge_by) = flatten(target), flatten(module)

    def rounds(leaves, state, peers=None):
        model, draft_model = merge_of(leaves[0]), merge_by(leaves[1])
        for one in (model, draft_model):
            if peers is not None and getattr(one, "shards", None) is not None:
                one.peers = peers
        drafter = make(model, draft_model)
        return DecodeStep(model, drafter, rule, what.width, budget=what.budget).decode(state, what.rounds)

    def begun():
        state = init_state(
            config, target, make(target, module), DTYPES[config.dtype], estimates=what.budget is not None
        )
        return _in_flight(state, config, what.start)

    options = decode_options(of, what.budget or what.batch * what.width)
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
    positions = last_positions(what)
    no_stops = jnp.full((B, 1), -1, jnp.int32), jnp.zeros(B, jnp.int32)

    def one(leaves, state):
        tokens, cache, _ = state
        model, valid = merge(leaves), jnp.ones(positions.shape, bool)
        view = PagedView(tables(B, M), positions, valid, recurrent=all_rows(B, what.width))
        hidden, cache = model(tokens, positions, cache, view)
        logits = forbid_early_stops(model.logits(hidden), positions + 1, *no_stops)
        # The next pass waits for this one: its tokens are the same, unless a logit is what no logit is.
        return tokens + (logits[:, :1, 0] > 1e38).astype(jnp.int32), cache, logits

    def passes(leaves, state):
        return jax.lax.fori_loop(0, what.passes, lambda _, state: one(leaves, state), state), None

    def fresh():
        tokens = jax.random.randint(jax.random.key(3), (B, what.width), 0, target.config.vocab_size, jnp.int32)
        cache = filled(init_cache(target.cache_shape(), 1 + B * M, PAGE, B, what.width, DTYPES[dtype]))
        return tokens, cache, jnp.zeros((B, what.width, target.config.vocab_size), DTYPES[dtype])

    return Program(passes, leaves, fresh, decode_options(leaves, B * what.width), repeats=True)


def _in_flight(state, config: EngineConfig, length: int):
    """A state in which every row is decoding a text of ``length`` tokens at temperature 1."""
    B = config.max_batch
    every = lambda value, dtype=jnp.int32: jnp.full(B, value, dtype)  # noqa: E731
    request = dataclasses.replace(
        state.request,
        length=every(length),
        limit=every(config.max_len),
        key_data=jnp.stack([jnp.zeros(B, jnp.uint32), jnp.arange(B, dtype=jnp.uint32)], axis=1),
        table=tables(B, config.pages_per_row),
        warp=Warp(every(1, jnp.float32), every(0), every(1, jnp.float32), every(0, jnp.float32)),
    )
    rows = state.draft_rows and DraftRows.of_admitted(every(length), state.draft_rows.tokens.shape[1])
    return dataclasses.replace(state, outcome=every(LIVE), request=request, previous=every(length - 1), draft_rows=rows)


def _with_noise(state):
    """The state with random numbers in its caches and features."""
    cache, features, draft = filled((state.cache, state.features, state.draft))
    return dataclasses.replace(state, cache=cache, features=features, draft=draft)


def last_positions(what: Forward):
    """int32 ``[B, width]``."""
    positions = what.live - what.width + jnp.arange(what.width, dtype=jnp.int32)
    return jnp.broadcast_to(positions, (what.batch, what.width))


def filled(tree):
    """The tree with random numbers in its floating-point arrays, and in the bytes of a rounded cache, whose scales stay as
    they are: computing with zeros would take less power than with real ones. Arrays that have memory give it up first, as
    there may be no room for two of each."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda leaf: isinstance(leaf, KVScales))
    keys = jax.random.split(jax.random.key(2), len(leaves) + 1)

    def made(leaf, key):
        if isinstance(leaf, KVScales) or not (leaf.dtype == STORED or jnp.issubdtype(leaf.dtype, jnp.floating)):
            return leaf
        sharding = None
        if not isinstance(leaf, jax.core.Tracer):
            sharding = leaf.sharding
            leaf.delete()
        return _normal(leaf.shape, leaf.dtype, sharding)(key)

    return structure.unflatten(map(made, leaves, keys))


@functools.cache  # one program for the caches of all layers: a program that makes all of them compiles for minutes
def _normal(shape: tuple[int, ...], dtype, sharding) -> Callable[[jax.Array], jax.Array]:
    if dtype == STORED:
        return jax.jit(lambda key: encode(jax.random.normal(key, shape, jnp.float32)), out_shardings=sharding)
    return jax.jit(lambda key: jax.random.normal(key, shape, dtype), out_shardings=sharding)


def rounding(target, what: "Decoding | Forward"):
    """The target, which rounds what it caches and the inputs of its maps as ``what`` says."""
    target = with_kv_cache(target, what.kv_cache)
    return with_quantized_activations(target, what.quantization) if what.activations else target


def with_kv_cache(target, kind: str | None):
    """The target, which rounds keys and values that it caches as ``Decoding.kv_cache`` says."""
    rounding = kv_rounding(target.config, kind)
    if rounding is not None:
        target = copied(target)
        target.kv_rounding = rounding
    return target


def kv_rounding(config: ModelConfig, kind: str | None) -> tuple[KVRounding, ...] | None:
    """The rounding of each layer, with scales of one if they are of heads."""
    if kind is None:
        return None
    ones = (1.0,) * config.num_kv_heads
    of_heads = KVRounding(ones, ones) if config.latent is None else KVRounding((1.0,))
    return (of_heads if kind == "fp8" else KVRounding(),) * config.num_layers


def tables(B: int, M: int):
    """Page tables in which every row has pages of its own, int32 ``[B, M]``."""
    return 1 + jnp.arange(B * M, dtype=jnp.int32).reshape(B, M)


def _whole_pages(slots: int) -> int:
    return -(-slots // PAGE) * PAGE
