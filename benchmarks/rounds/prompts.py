"""The program that reads a long prompt, on random weights, and the least time that it can take."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.rounds.floors import FLOPS, language_model, output_head
from benchmarks.rounds.programs import PAGE, Program, tables
from jspec.config import EngineConfig, ModelConfig, Speculation
from jspec.drafting.methods import drafter_for
from jspec.engine.runner.compile import decode_options
from jspec.engine.runner.state import init_state
from jspec.engine.runner.step import DecodeStep
from jspec.engine.runner.step_io import PrefillInputs
from jspec.models.flatten import flatten
from jspec.models.params import DTYPES
from jspec.sampling.verify import RULES


@dataclasses.dataclass(frozen=True)
class Reading:
    """A prompt of one request that is read as the engine reads it without a drafter, in passes of the size that it has by
    default where texts need not be reproducible.

    Attributes:
      tokens: of the prompt.
      quantization: of the target's weights.
    """

    tokens: int
    quantization: Any = None

    def __str__(self) -> str:
        weights = f"{self.quantization} weights, " if self.quantization else ""
        return f"prefill, {weights}{self.tokens:,} tokens"

    def engine_config(self, target: ModelConfig, dtype: str) -> EngineConfig:
        slots = -(-self.tokens // PAGE) * PAGE
        config = EngineConfig(max_batch=1, max_len=slots, dtype=dtype, page_size=PAGE, read_ahead=0, reproducible=False)
        return config.for_target(target)

    def passes(self, config: EngineConfig) -> int:
        """Prefill passes of the prompt, of which the last may have padding."""
        return -(-self.tokens // (config.chunk_buckets[-1] * config.chunk))


def reading_program(target, config: EngineConfig, what: Reading) -> Program:
    """All passes of the prompt, one after another, in the largest prefill program of the engine."""
    make = drafter_for(None, target.config, Speculation())
    n, c, passes = config.chunk_buckets[-1], config.chunk, what.passes(config)
    leaves, merge = flatten(target)
    tokens = jax.random.randint(jax.random.key(3), (passes, n * c + 1), 0, target.config.vocab_size, jnp.int32)
    table = jnp.broadcast_to(tables(1, config.pages_per_row), (n, config.pages_per_row))

    def read(leaves, state):
        model = merge(leaves)
        step = DecodeStep(model, make(model, None), RULES["match"], 1, expand_latents=config.expand_latents)

        def one(i, state):
            first = jnp.arange(n, dtype=jnp.int32) * c
            start = i * (n * c) + first
            count = jnp.clip(what.tokens - start, 0, c)
            row = jnp.where((count > 0) & (start + count == what.tokens), 0, config.num_rows)
            of_request = jnp.where(count > 0, 0, config.num_rows)
            chunks = tokens[i][first[:, None] + jnp.arange(c + 1, dtype=jnp.int32)[None]]
            return step.prefill(state, PrefillInputs(row, chunks, start, count, table, of_request))

        return jax.lax.fori_loop(0, passes, one, state), None

    def fresh():
        return init_state(config, target, make(target, None), DTYPES[config.dtype])

    return Program(read, leaves, fresh, decode_options(leaves, n * c), repeats=True)


def reading_floor(target, what: Reading, passes: int, bandwidth: float) -> float:
    """Seconds of the prompt: its products at 790 TFLOP/s, those of linear maps and those of attention with what stands
    before each token, or one read of the weights for each pass if that takes longer. Logits are not computed, and what gated
    delta nets multiply besides their linear maps is not counted."""
    config = target.config
    model, head = language_model(target, config.experts and config.experts.all), output_head(target)
    pairs = what.tokens * (what.tokens + 1) / 2
    seen = sum(pairs if window is None else min(pairs, what.tokens * window) for window in _windows(config))
    of_attention = 4 * config.num_heads * config.head_dim * seen
    of_maps = 2 * (model.numbers - head.numbers) * what.tokens
    return max((of_maps + of_attention) / FLOPS, passes * (model.bytes - head.bytes) / bandwidth)


def _windows(config: ModelConfig) -> list[int | None]:
    """The windows of the layers with attention, None for one that sees all."""
    nets = config.delta_nets
    recurrent = (False,) * config.num_layers if nets is None else nets.layers
    return [window for window, skipped in zip(config.windows, recurrent, strict=True) if not skipped]
