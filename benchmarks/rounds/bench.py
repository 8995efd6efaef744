"""Random weights of a shape, and the times of programs that run on them."""

import dataclasses
import functools
import itertools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.random_modules import random_module, random_shards
from benchmarks.rounds.experts_hit import experts_hit, experts_hit_evenly
from benchmarks.rounds.floors import draft_passes, floor, target_pass
from benchmarks.rounds.hlo import launched
from benchmarks.rounds.profile import kernel_times, report
from benchmarks.rounds.programs import (
    PAGE,
    Decoding,
    Forward,
    Program,
    decoding_program,
    forward_program,
    last_positions,
    rounding,
    tables,
)
from benchmarks.rounds.prompts import Reading, reading_floor, reading_program
from benchmarks.shapes import Pair, head_for
from jspec.config import ModelConfig, Shards
from jspec.config.model_fields import HEAD, PLAIN_HEAD
from jspec.engine.round_log import RoundLog
from jspec.engine.runner.state import LIVE
from jspec.models.params import DTYPES
from jspec.models.sharding import mesh_of, on_every_device
from jspec.pallas.collectives.peers import room_for
from jspec.pallas.collectives.workspace import Exchange, Workspace, are_lost
from jspec.pallas.dispatch import wants_one_order
from jspec.quantization.formats import format_of


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


# Names of two formats together -> that of most maps, that of some, and how the names of these end.
MIXED = {
    "fp8+nvfp4": ("nvfp4", "fp8", ("attention.qkv", "attention.out")),
    "int4+scaled": ("int4_128_float16", "int4_128_float16_scaled", ("attention.out", "mlp.down")),
    "q4_k_m": ("int4_32_levels_offsets", "int6_16_levels", ("attention.values", "mlp.down")),
}
_AS_PUBLISHED = ("fp8_block", "int4_128_float16", "mxfp8", "nf4_64", "nvfp4")  # whose output heads are not quantised


def stored_as(config: ModelConfig, quantization: str | None) -> ModelConfig:
    """A model with weights in a format, with those of ``MIXED``, or with None as it is. The output head is quantised where
    published checkpoints have it so; with ``int4`` all is as ``jspec-convert`` makes it."""
    if quantization is None:
        return config
    if quantization == "int4":
        return config.with_quantization(quantization)
    most, some, ends = MIXED.get(quantization, (quantization, None, ()))
    layers, head = range(config.num_layers), PLAIN_HEAD if most in _AS_PUBLISHED else ()
    if quantization == "q4_k_m":
        layers, head = [layer for layer in layers if _has_more_bits(layer, config.num_layers)], ((HEAD, some),)
    others = tuple((f"layers.{layer}.{end}", some) for layer in layers for end in ends)
    if config.latent is not None and (form := format_of(most)) is not None and not form.serves_latents:
        maps = itertools.product(range(config.num_layers), ("keys", "values"))
        others = (*others, *((f"layers.{layer}.attention.{name}", None) for layer, name in maps))
    return dataclasses.replace(config, quantization=most, other_formats=(*others, *head))


def _has_more_bits(layer: int, layers: int) -> bool:
    """Whether llama.cpp gives values and down maps of a layer six bits in a file of Q4_K_M."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


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
        self._timed: dict[tuple[Decoding | Forward | Reading, bool, bool], Timed] = {}

    @functools.cache  # noqa: B019 (a bench lives as long as the program)
    def target_in(self, quantization: str | None):
        """The target with weights ``stored_as`` this says."""
        config = stored_as(self.pair.target, quantization)
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

    def time(self, what: Decoding | Forward | Reading) -> Timed:
        """The times of a program, which is compiled and run the first time that it is asked for; with the kernels of one
        order of sums within ``jspec.pallas.dispatch.one_order``."""
        key, measures = (
            (what, self.packets, wants_one_order()),
            {Decoding: self._decoding, Forward: self._forward, Reading: self._reading},
        )
        if key not in self._timed:
            self._timed[key] = measures[type(what)](what)
        return self._timed[key]

    def _decoding(self, what: Decoding) -> Timed:
        config, module = self.draft(what.method, what.draft_quantization, what.draft_vocabulary, what.draft_in_shards)
        target = rounding(self.target_in(what.quantization), what)
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
        width = what.budget / what.batch if what.budget else what.width
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
        target = rounding(self.target_in(what.quantization), what)
        seconds, kernels, (state, _) = self._run(forward_program(target, self.dtype, what), what.passes)
        hit = experts_hit(target, state[0], last_positions(what), state[1], tables(what.batch, what.capacity // PAGE))
        passes = [target_pass(target, what.batch, what.width, what.live, hit)]
        return Timed(seconds, floor(passes, self.bandwidth), kernels, what.live, 0.0, hit)

    def _reading(self, what: Reading) -> Timed:
        """Of the whole prompt; launches are those of a pass."""
        target = self.target_in(what.quantization)
        config = what.engine_config(target.config, self.dtype)
        seconds, kernels, _ = self._run(reading_program(target, config, what), 1)
        least = reading_floor(target, what, what.passes(config), self.bandwidth)
        return Timed(seconds, least, kernels, what.tokens / 2, 0.0)

    def _run(self, program: Program, rounds: int):
        """Seconds and launches of a round, and what the last call returned, logs on the host."""
        make = program.fresh  # not compiled as a whole: it makes an array for every layer
        function = jax.jit(program.function, donate_argnums=1, compiler_options=program.options)
        example = jax.eval_shape(make) if self.shards is None else make()  # which says on which devices its arrays lie
        compiled = function.lower(program.leaves, example).compile()
        del example
        seconds, state, log = [], None, None
        for _ in range(self.repeats + 1):
            if state is None or not program.repeats:
                state = None  # there may be no room for the caches of two calls
                state = jax.block_until_ready(make())
            started = time.perf_counter()
            state, log = jax.block_until_ready(compiled(program.leaves, state))
            seconds.append((time.perf_counter() - started) / rounds)
        if self.profiled:
            last = make()
            print(report(kernel_times(lambda: compiled(program.leaves, last)), rounds), flush=True)
        kernels = len(launched(compiled.as_text() or "", loop=True))
        return statistics.median(seconds[1:]), kernels, (state, jax.device_get(log))


def _next_pass(state, K: int, vocab_size: int):
    """Tokens, positions, cache and tables of a verify pass that might come next, with random drafts."""
    length = state.request.length[:, None]
    newest = jnp.take_along_axis(state.tokens, length - 1, axis=1)
    drafts = jax.random.randint(jax.random.key(3), (len(length), K), 0, vocab_size, jnp.int32)
    positions = length - 1 + jnp.arange(K + 1, dtype=jnp.int32)[None, :]
    return jnp.concatenate([newest, drafts], axis=1), positions, state.cache, state.request.table
