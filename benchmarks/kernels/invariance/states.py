"""A target of two layers, the first of them with recurrent states: which passes give a token the same residual streams and
logits? Prefill adds chunks of 64 tokens to a state and rounds one token after another, so two classes are what is expected:
prefill passes, and rounds."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.invariance.run import Job, Run, compile_all, shape_of
from benchmarks.kernels.invariance.steps import LAYERS, PAGE, last_layers
from benchmarks.random_modules import random_module
from benchmarks.shapes import QWEN36_27B, QWEN36_35B_A3B, TINY_HYBRID
from jspec.config import ModelConfig
from jspec.config.engine import CHUNK_OF_STATES as CHUNK
from jspec.engine.runner.compile import decode_options
from jspec.models.cache_pools import init_cache
from jspec.models.flatten import flatten
from jspec.models.kv_cache import PagedView
from jspec.models.params import DTYPES
from jspec.pallas.delta_net.state import PrefillRows, VerifyRows
from jspec.pallas.dispatch import one_order

KINDS = {
    "27B": (QWEN36_27B, None),
    "27B in int4": (QWEN36_27B, "int4"),
    "27B in FP8 blocks": (QWEN36_27B, "fp8_block"),
    "35B-A3B": (QWEN36_35B_A3B, None),
}
SLOTS, PROMPT, LAST = (
    1024,
    832,
    836,
)  # of a text: rounds read what is behind the prompt, up to the token that is compared
ROUNDS = ((1, 1), (1, 5), (3, 2), (16, 1), (16, 5), (64, 5))  # rows and query tokens
PREFILL = (64, 512, 1024)  # tokens of a pass
VOCABULARY = 32_768


def states(run: Run, tokens):
    """A line for each kind."""
    del tokens
    for name, (shape, quantization) in KINDS.items():
        if run.small and name != "27B":
            continue
        config = last_layers(TINY_HYBRID if run.small else shape, VOCABULARY, quantization)
        run.attempt(f"states, {name}", of_kind, run, name, config)


def of_kind(run: Run, kind: str, config: ModelConfig):
    """Print classes after each layer, and of the logits of rounds."""
    text = Text.make(config, (ROUNDS[0], ROUNDS[2]) if run.small else ROUNDS, "float32" if run.small else "bfloat16")
    programs = compile_all(text.jobs())
    found = {}
    for name, program in programs.items():
        if isinstance(program, Exception):
            raise program
        with run.watched():
            found[name] = (
                text.last_of_prefill(programs, name) if isinstance(name, int) else text.of_rounds(programs, name)
            )
    named_so = {f"prefill {name}" if isinstance(name, int) else f"{name[0]}x{name[1]}": x for name, x in found.items()}
    for layer in range(LAYERS + 1):
        streams = {name: np.split(one[0], LAYERS + 1)[layer] for name, one in named_so.items()}
        run.say_classes(f"states, {kind}, stream {layer}", streams)
    run.say_classes(f"states, {kind}, logits", {name: one[1] for name, one in named_so.items()})


@dataclasses.dataclass
class Text:
    """A text of ``SLOTS`` tokens, which row 0 reads, and a target that reads it."""

    config: ModelConfig
    rounds: tuple[tuple[int, int], ...]
    leaves: Any
    merge: Any
    cache: Any
    tokens: np.ndarray

    @classmethod
    def make(cls, config: ModelConfig, rounds: tuple[tuple[int, int], ...], dtype: str) -> "Text":
        model = random_module(config, dtype=dtype)
        leaves, merge = flatten(model)
        rows = max(B for B, _ in rounds)
        cache = init_cache(model.cache_shape(), 1 + rows * SLOTS // PAGE, PAGE, rows, 8, DTYPES[dtype])
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, SLOTS).astype(np.int32)
        return cls(config, rounds, leaves, merge, cache, tokens)

    def jobs(self) -> dict[Any, Job]:
        """Prefill passes by their tokens, and rounds by their rows and query tokens."""
        return {n: self._job(n // CHUNK, CHUNK, True) for n in PREFILL} | {
            size: self._job(*size) for size in self.rounds
        }

    def _job(self, B: int, T: int, prefill: bool = False) -> Job:
        def step(leaves, cache, tokens, positions, valid, table, recurrent, index):
            model = self.merge(leaves)
            view = PagedView(table, positions, valid, recurrent=recurrent, shared=prefill)
            hidden, streams, cache = model.with_auxiliary(tokens, positions, cache, view, tuple(range(LAYERS + 1)))
            row, place = index // T, index % T
            return (streams[row, place], model.logits(hidden[row, place][None])[0]), cache

        numbers, flags, row = jnp.zeros((B, T), jnp.int32), jnp.zeros((B, T), bool), jnp.zeros(B, jnp.int32)
        table = jnp.zeros((B, SLOTS // PAGE), jnp.int32)
        flag = row.astype(bool)
        recurrent = PrefillRows(row, row, flag, flag) if prefill else VerifyRows(row, row, row, row, flag)
        args = self.leaves, self.cache, numbers, numbers, flags, table, recurrent, jnp.int32(0)
        options = decode_options(self.leaves, B * T)
        return Job(one_order()(step), tuple(map(shape_of, args)), options, donate=1)

    def last_of_prefill(self, programs, pass_tokens: int, end: int = SLOTS, at: int = LAST):
        """What the token at ``at`` gets in prefill passes of so many tokens over those before ``end``, a multiple of 64."""
        found, chunks = None, pass_tokens // CHUNK
        for first in range(0, end, pass_tokens):
            positions = (first + np.arange(pass_tokens, dtype=np.int32)).reshape(chunks, CHUNK)
            valid = positions < end
            entry, live = np.arange(chunks), valid[:, 0]
            row = np.where(live, 0, self._rows).astype(np.int32)
            begins = (entry == 0) & (first == 0)
            rows = PrefillRows(row, valid.sum(1).astype(np.int32), begins, (entry > 0) & live)
            inside = int(np.clip(at - first, 0, pass_tokens - 1))
            own = np.broadcast_to(self._tables[0], (chunks, SLOTS // PAGE))
            out = self._call(programs[pass_tokens], self.tokens[positions], positions, valid, own, rows, inside)
            found = out if first <= at < first + pass_tokens else found
        return found

    def of_rounds(self, programs, size: tuple[int, int]):
        """What the token at ``LAST`` gets in rounds behind the prompt, in the last of B rows beside other texts."""
        B, T = size
        self.last_of_prefill(programs, max(PREFILL), PROMPT, 0)
        rng, found = np.random.default_rng(1), None
        for i, first in enumerate(range(PROMPT, LAST + 1, T)):
            positions = np.broadcast_to(first + np.arange(T, dtype=np.int32), (B, T))
            tokens = rng.integers(0, self.config.vocab_size, (B, T)).astype(np.int32)
            tokens[-1] = self.tokens[positions[-1]]
            row = np.roll(np.arange(B, dtype=np.int32), -1)
            every = lambda number: np.full(B, number, np.int32)  # noqa: E731
            rows = VerifyRows(row, every(T), every(T if i else 0), every(i % 2), np.zeros(B, bool))
            index = (B - 1) * T + min(LAST - first, T - 1)
            valid = np.ones((B, T), bool)
            found = self._call(programs[size], tokens, positions, valid, self._tables[row], rows, index)
        return found

    @property
    def _rows(self) -> int:
        return max(B for B, _ in self.rounds)

    @property
    def _tables(self) -> np.ndarray:
        return 1 + np.arange(self._rows * SLOTS // PAGE, dtype=np.int32).reshape(self._rows, -1)

    def _call(self, program, tokens, positions, valid, table, rows, index: int):
        arrays = jax.tree.map(jnp.asarray, (tokens, positions, valid, table, rows))
        out, self.cache = program(self.leaves, self.cache, *arrays, jnp.int32(index))
        return tuple(np.asarray(x) for x in out)
