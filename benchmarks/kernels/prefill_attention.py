"""Attention of a prefill pass on a Hopper GPU: do both kernels agree with the reference implementation, and which is faster?

    python -m benchmarks.kernels.prefill_attention                      # needs a Hopper GPU; about three minutes
    python -m benchmarks.kernels.prefill_attention --heads qwen3.6-27b  # of some models
    python -m benchmarks.kernels.prefill_attention --seconds 60         # begins no further timing after so long
    python -m benchmarks.kernels.prefill_attention --json FILE          # also writes a result, see report/results.py
    python -m benchmarks.kernels.prefill_attention --smoke              # small and anywhere (jax 0.11 or later), interpreted

``mosaic`` is ``prefill_attention_kernel`` and ``triton`` is ``paged_attention_kernel``, which ``paged_attention`` chooses
between (``CHOSEN`` in jspec/pallas/attention/table.py). It exits 1 if one of them is wrong by more than rounding.

A pass is cut into segments as the engine cuts it by default. Where those do not fill the blocks of ``mosaic``, it gets
longer ones, which ``triton`` is timed with, too. Eight calls with different queries make one program, as the layers of a
model do, and share what only depends on positions. Times are in microseconds a call. The floor is that of the products of
queries that see their keys, at 790 TFLOP/s."""

import argparse
import dataclasses
import functools
import itertools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.report import results
from benchmarks.rounds.floors import FLOPS
from benchmarks.rounds.programs import PAGE
from jspec.config.engine import CHUNK, CHUNK_OF_STATES
from jspec.pallas.attention.paged import paged_attention_kernel, paged_attention_reference
from jspec.pallas.attention.prefill_launch import WARPGROUP_QUERIES, WARPGROUPS, block_heads_of
from jspec.pallas.attention.prefill_sm90 import prefill_attention_kernel
from jspec.pallas.attention.spec import AttentionSpec, PagedQueries

CALLS, REPEATS, COMPILERS = 8, 5, 12
KERNELS: dict[str, Callable] = {"mosaic": prefill_attention_kernel, "triton": paged_attention_kernel}


@dataclasses.dataclass(frozen=True)
class Heads:
    """N attention heads of H numbers over G KV heads; ``segment`` tokens are read together by default."""

    N: int
    G: int
    H: int
    segment: int = CHUNK

    @property
    def filling(self) -> int:
        """The tokens of a segment that fills the blocks of ``mosaic``."""
        return max(self.segment, WARPGROUPS * WARPGROUP_QUERIES // block_heads_of(self.N // self.G))

    @property
    def ways(self) -> list[tuple[str, int]]:
        """The kernels, with tokens of a segment."""
        return [("mosaic", self.filling), *(("triton", T) for T in sorted({self.segment, self.filling}))]


@dataclasses.dataclass(frozen=True)
class Pass:
    """So many tokens of ``prompts``, each of which has ``behind`` tokens before them."""

    tokens: int
    behind: int = 0
    prompts: int = 1

    def __str__(self) -> str:
        return f"{self.prompts} x {self.tokens // self.prompts:,} behind {self.behind:,}"

    @property
    def slots(self) -> int:
        return self.behind + self.tokens // self.prompts


HEADS = {
    "qwen3.6-27b": Heads(24, 4, 256, CHUNK_OF_STATES),
    "qwen3.6-35b-a3b": Heads(16, 2, 256, CHUNK_OF_STATES),
    "qwen3-14b": Heads(40, 8, 128),
    "qwen2.5-7b": Heads(28, 4, 128),
    "llama-3.2-3b": Heads(24, 8, 128),
    "llama-3.1-8b": Heads(32, 8, 128),
}
PASSES = (
    *(Pass(tokens, behind) for tokens, behind in ((512, 0), (512, 32_000), (2_048, 0), (2_048, 30_000))),
    *(Pass(8_192, prompts=16), Pass(8_192), Pass(8_192, 24_000)),
)
SMOKE_HEADS, SMOKE_PASSES = {"smoke": Heads(6, 1, 64)}, (Pass(64, 40),)


def ragged(heads: Heads, T: int, rows: int = 3, pages: int = 5):
    """Arguments in which rows end anywhere, the last one with invalid query tokens; what no query sees is NaN."""
    rng, S = np.random.default_rng(0), pages * PAGE
    positions = rng.integers(0, S - T, (rows, 1)) + np.arange(T)
    valid = np.arange(T) < np.where(np.arange(rows)[:, None] < rows - 1, T, T // 2 + 1)
    newest = np.where(valid, positions, -1).max(axis=1)
    table = 1 + rng.permutation(rows * pages).reshape(rows, pages)
    pools = np.full((2, heads.G, 1 + table.size, PAGE, heads.H), np.nan, np.float32)
    for b in range(rows):
        text = rng.normal(size=(2, heads.G, S, heads.H))
        text[:, :, newest[b] + 1 :] = np.nan
        pools[:, :, table[b]] = text.reshape(2, heads.G, pages, PAGE, heads.H)
    q = rng.normal(size=(rows, T, heads.N, heads.H))
    queries = PagedQueries(*(jnp.asarray(x) for x in (table.astype(np.int32), positions.astype(np.int32), valid)))
    return *(jnp.asarray(x, jnp.bfloat16) for x in (q, *pools)), queries


def check(name: str, heads: Heads, window: int | None, how: dict[str, Any]) -> bool:
    """Print a line for each kernel; whether errors are within rounding, and invalid query tokens get 0."""
    good, spec = True, AttentionSpec(window)
    for kernel, T in heads.ways:
        q, k, v, queries = ragged(heads, T)
        exact = lambda k, v: paged_attention_reference(q.astype(jnp.float32), k, v, queries, spec)  # noqa: B023, E731
        k32, v32 = (x.astype(jnp.float32) for x in (k, v))
        wanted, bound = exact(k32, v32), 2**-7 * exact(k32, jnp.abs(v32)) + 1e-5
        got = jax.jit(functools.partial(KERNELS[kernel], spec=spec, interpret=how[kernel]))(q, k, v, queries)
        valid, got = queries.valid[:, :, None, None], got.astype(jnp.float32)
        error = float(jnp.max(jnp.where(valid, jnp.abs(got - wanted) / bound, jnp.abs(got))))
        ok = error <= 1  # false for NaN
        good &= ok
        what = f"{name}, {heads.N}/{heads.G} heads of {heads.H}, window {window or '-'}, {kernel}, segments of {T}"
        print(f"{what:<80} error / rounding {error:.2f}{'' if ok else '  WRONG'}", flush=True)
    return good


def queries_of(what: Pass, T: int, M: int) -> PagedQueries:
    """The segments of a pass, in tables of M pages."""
    B, rng = what.tokens // T, np.random.default_rng(0)
    prompt, index = np.divmod(np.arange(B), B // what.prompts)
    positions = (what.behind + index * T)[:, None] + np.arange(T)
    pages = -(-what.slots // PAGE)
    table = np.zeros((B, M), np.int32)
    table[:, :pages] = (1 + rng.permutation(what.prompts * pages).reshape(what.prompts, pages))[prompt]
    return PagedQueries(jnp.asarray(table), jnp.asarray(positions, jnp.int32), jnp.ones((B, T), bool))


def flop(heads: Heads, what: Pass) -> float:
    """Of the products of each query with the keys and the values that it sees."""
    tokens = what.tokens // what.prompts
    pairs = what.prompts * (tokens * what.behind + tokens * (tokens + 1) / 2)
    return 4.0 * heads.N * heads.H * pairs


def seconds(compiled: Callable, args, repeats: int) -> float:
    """Median time of one of the calls in a program."""
    jax.block_until_ready(compiled(*args))
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - started)
    return statistics.median(times) / len(args[0])


def measure(name: str, heads: Heads, passes: Sequence[Pass], how: dict[str, Any], until: float, result: results.Result):
    """Print a line for each pass and kernel, and put the times into ``result``."""
    smoke, most = any(how.values()), max(what.tokens for what in passes)
    M = -(-max(what.slots for what in passes) // PAGE)
    pages = max(what.prompts * -(-what.slots // PAGE) for what in passes)
    pools = [jax.random.normal(key, (heads.G, 1 + pages, PAGE, heads.H), jnp.bfloat16) for key in _keys(2)]
    queries = [jax.random.normal(key, (most, heads.N, heads.H), jnp.bfloat16) for key in _keys(1 if smoke else CALLS)]

    def arguments(T: int, what: Pass):
        return [q[: what.tokens].reshape(-1, T, heads.N, heads.H) for q in queries], *pools, queries_of(what, T, M)

    def program(job):
        (kernel, T), tokens = job
        attend = functools.partial(KERNELS[kernel], spec=AttentionSpec(), interpret=how[kernel])
        args = arguments(T, next(what for what in passes if what.tokens == tokens))
        return jax.jit(lambda queries, *others: [attend(q, *others) for q in queries]).lower(*args).compile()

    jobs = [(way, tokens) for way in heads.ways for tokens in sorted({what.tokens for what in passes})]
    with ThreadPoolExecutor(COMPILERS) as pool:
        programs = dict(zip(jobs, pool.map(program, jobs), strict=True))
    for what, (kernel, T) in itertools.product(passes, heads.ways):
        key, flops = f"{name}, {what}, {kernel}, segments of {T}", flop(heads, what)
        if time.monotonic() > until:
            print(f"{key:<80} left out: the time is over", flush=True)
            continue
        took = seconds(programs[(kernel, T), what.tokens], arguments(T, what), 1 if smoke else REPEATS)
        result.measured[key], result.floors[key] = 1e6 * took, 1e6 * flops / FLOPS
        result.details[key] = {"unit": "us", "tflops": flops / took / 1e12}
        rate = f"{flops / took / 1e12:>6.0f} TFLOP/s, {flops / FLOPS / took:>4.0%} of the floor's rate"
        print(f"{key:<80} {1e6 * took:>9.1f} us {rate}", flush=True)


def _keys(count: int):
    return jax.random.split(jax.random.key(count), count)


def verdict(name: str, measured: dict[str, float]):
    """Print by how much ``mosaic`` is faster than the best of ``triton``, pass by pass."""
    by_pass: dict[str, dict[str, list[float]]] = {}
    for key, took in measured.items():
        of, what, kernel, _ = key.split(", ")
        if of == name:
            by_pass.setdefault(what, {}).setdefault(kernel, []).append(took)
    ratios = {
        what: min(took["triton"]) / took["mosaic"][0] for what, took in by_pass.items() if len(took) == len(KERNELS)
    }
    if ratios:
        listed = "; ".join(f"{what}: {ratio:.2f}" for what, ratio in ratios.items())
        print(f"{name}: triton takes so many times as long as mosaic: {listed}\n", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--seconds", type=float, default=400, help="begin no further timing after so long")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the result there")
    parser.add_argument("--smoke", action="store_true", help="small sizes, interpreted kernels, any machine")
    args = parser.parse_args()
    if not args.smoke and jax.default_backend() != "gpu":
        parser.error("no GPU: the kernels are compiled for Hopper GPUs; --smoke runs a small interpreted version here")
    until, how = time.monotonic() + args.seconds, {"mosaic": None, "triton": False}
    shapes, passes = {name: HEADS[name] for name in args.heads}, PASSES
    if args.smoke:
        from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams  # pyright: ignore  # not in jax 0.10

        shapes, passes, how = SMOKE_HEADS, SMOKE_PASSES, {"mosaic": InterpretGPUParams(), "triton": True}
    windows = (100,) if args.smoke else (None, 100)
    good = all([check(*shape, window, how) for shape in shapes.items() for window in windows])
    result = results.begin("prefill_attention", {"heads": list(shapes), "smoke": args.smoke})
    for name, heads in shapes.items():
        measure(name, heads, passes, how, until, result)
        verdict(name, result.measured)
        if args.json:
            results.write(result, args.json)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
