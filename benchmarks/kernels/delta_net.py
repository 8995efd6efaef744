"""The gated delta net on a GPU: are its kernels right, and how far are verify passes from one read and write of the state?

    python -m benchmarks.kernels.delta_net                # needs an NVIDIA GPU; less than a minute
    python -m benchmarks.kernels.delta_net --sweep        # times other tilings as well
    python -m benchmarks.kernels.delta_net --json FILE    # also writes a result, see benchmarks/report/results.py
    python -m benchmarks.kernels.delta_net --smoke        # small and anywhere: interpreted kernels, meaningless times

It exits 1 if a kernel differs from its reference implementation by more than rounding, if tokens that are decoded one by
one and in verify passes of five, with drafts rejected, differ in a bit, or if a prompt does that is cut elsewhere. The shape
is that of a layer of Qwen3.5-27B: 48 value heads and 16 key heads of 128, activations in bfloat16.

Times are in microseconds. That of a verify pass is of one layer, and goes through so many layers that no state is found in
the L2 cache; its floor is that of reading and writing the states once at the read rate that is measured first. That of
prefill is of 32,000 tokens, read in segments; its floor is that of the bfloat16 products which it takes at 790 TFLOP/s: six
for each one of two float32 matrices, three where one is of bfloat16, and one where both are. Its convolution is timed by
itself, over the same tokens in segments of 64; the floor is one read and one write of its channels."""

import argparse
import dataclasses
import functools
import itertools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.kernels import bandwidth
from benchmarks.report import results
from jspec.pallas.delta_net import prefill as prefills
from jspec.pallas.delta_net import verify as verifies
from jspec.pallas.delta_net.chunked import CHUNK
from jspec.pallas.delta_net.convolution import (
    convolve_prefill_kernel,
    convolve_prefill_reference,
    convolve_verify_kernel,
)
from jspec.pallas.delta_net.prefill import PrefillTiling, prefill_kernel, prefill_reference
from jspec.pallas.delta_net.projections import DeltaHeads
from jspec.pallas.delta_net.state import DeltaState, PrefillRows, VerifyRows, init_state
from jspec.pallas.delta_net.verify import VerifyTiling, verify_kernel, verify_reference

W, MOST_TOKENS, FLOPS, L2_BYTES = 4, 5, 790e12, 3e8
QWEN = DeltaHeads(keys=16, values=48, key_size=128, value_size=128)  # of Qwen3.5-27B


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured: rows and query tokens of verify passes, tokens of a prompt and of its segments."""

    heads: DeltaHeads = QWEN
    rows: tuple[int, ...] = (1, 16, 64)
    queries: tuple[int, ...] = (1, 5)
    prompt: int = 32_000
    segment: int = 6_400
    calls: int = 50
    repeats: int = 5
    most_layers: int = 48


SMOKE = Sizes(DeltaHeads(1, 2, 32, 32), (2,), (1, 5), 128, 64, 1, 1, 2)


def tokens_of(heads: DeltaHeads, B: int, T: int, seed: int = 0, dtype="bfloat16"):
    """Convolved queries, keys and values, decays and betas of T tokens in each of B rows."""
    keys = jax.random.split(jax.random.key(seed), 3)
    qkv = jax.random.normal(keys[0], (B, T, heads.channels)).astype(dtype)
    g = -jnp.exp(jax.random.normal(keys[1], (B, T, heads.values)) - 2)
    return qkv, g, jax.nn.sigmoid(jax.random.normal(keys[2], g.shape))


def taps_of(heads: DeltaHeads, dtype):
    """Weights of a convolution."""
    return jax.random.normal(jax.random.key(3), (W, heads.channels), dtype)


def verify_rows(B: int, T: int, accepted, half) -> VerifyRows:
    everywhere = lambda x: jnp.full(B, x, jnp.int32)  # noqa: E731
    return VerifyRows(jnp.arange(B, dtype=jnp.int32), *map(everywhere, (T, accepted, half)), jnp.zeros(B, bool))


def prefill_rows(B: int, T: int, fresh: bool) -> PrefillRows:
    row, tokens = jnp.arange(B, dtype=jnp.int32), jnp.full(B, T, jnp.int32)
    return PrefillRows(row, tokens, jnp.full(B, fresh), jnp.zeros(B, bool))


def chain_rows(B: int, tokens: tuple[int, ...]) -> PrefillRows:
    """B prompts, of each of which a pass has segments of so many tokens, one behind another."""
    first = jnp.arange(B * len(tokens), dtype=jnp.int32) % len(tokens) == 0
    row = jnp.repeat(jnp.arange(B, dtype=jnp.int32), len(tokens))
    return PrefillRows(row, jnp.tile(jnp.int32(tokens), B), first, ~first)


def segments_of(x, count: int):
    """``[B, T, ...]`` to ``[B count, CHUNK, ...]``, with zeros behind the T tokens."""
    B, T, *rest = x.shape
    return jnp.pad(x, ((0, 0), (0, count * CHUNK - T), *[(0, 0)] * len(rest))).reshape(B * count, CHUNK, *rest)


def largest_difference(x, y) -> float:
    """Relative to the largest number."""
    x, y = (jnp.asarray(a, jnp.float32) for a in (x, y))
    return float(jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y)))


def report(what: str, ok: bool, detail: str) -> bool:
    print(f"{what:<44} {detail} {'' if ok else 'WRONG'}", flush=True)
    return ok


def check(heads: DeltaHeads, interpret: bool) -> bool:
    """Print a line for each comparison; whether all are good."""
    verify = functools.partial(verify_kernel, interpret=interpret)
    prefill = functools.partial(prefill_kernel, interpret=interpret)
    B, N = 2, 12
    start = init_state(B, heads, W, MOST_TOKENS, jnp.float32)
    prompt, texts = tokens_of(heads, B, 2 * CHUNK + 9, 1, "float32"), tokens_of(heads, B, N, 2, "float32")
    rows = prefill_rows(B, prompt[0].shape[1], True)
    o, read = prefill(start, rows, *prompt)
    wanted, wanted_state = jax.jit(prefill_reference)(start, rows, *prompt)
    errors = largest_difference(o, wanted), largest_difference(read.S, wanted_state.S)
    good = report(
        "prefill, outputs and states", max(errors) < 3e-5, f"largest differences {errors[0]:.1e}, {errors[1]:.1e}"
    )
    _, cut = prefill(start, prefill_rows(B, CHUNK, True), *(x[:, :CHUNK] for x in prompt))
    _, cut = prefill(cut, prefill_rows(B, CHUNK + 9, False), *(x[:, CHUNK:] for x in prompt))
    same = bool(jnp.all(cut.S == read.S))
    good &= report("prefill, cut at 64", same, "the same bits" if same else "other bits")
    _, chained = prefill(start, chain_rows(B, (CHUNK, CHUNK, 9)), *(segments_of(x, 3) for x in prompt))
    same = bool(jnp.all(chained.S == read.S))
    good &= report("prefill, three segments in a pass", same, "the same bits" if same else "other bits")
    inputs = chain_rows(B, (CHUNK, CHUNK, 9)), segments_of(prompt[0], 3), taps_of(heads, jnp.float32)
    y, columns = convolve_prefill_kernel(start.columns, *inputs, interpret=interpret)
    wanted, wanted_columns = jax.jit(convolve_prefill_reference)(start.columns, *inputs)
    error, same = largest_difference(y, wanted), bool(jnp.all(columns == wanted_columns))
    detail = f"largest difference {error:.1e}, {'the same' if same else 'other'} columns"
    good &= report("prefill, convolution", error < 3e-5 and same, detail)

    one_by_one, last = decode(verify, read, texts, 1)
    for name, function in (("kernel", verify), ("reference", jax.jit(verify_reference))):
        got, state = decode(function, read, texts, MOST_TOKENS)
        errors = largest_difference(got, one_by_one), largest_difference(state.S, last.S)
        ok = max(errors) < (3e-5 if name == "reference" else 1e-38)
        good &= report(
            f"verify passes of {MOST_TOKENS}, {name}", ok, f"largest differences {errors[0]:.1e}, {errors[1]:.1e}"
        )
    return good


def decode(function, state: DeltaState, texts, T: int):
    """Outputs of all tokens, verified in passes of T of which all but two are accepted, and the state with all folded in."""
    qkv, g, beta = texts
    B, N, _ = qkv.shape
    done, accepted, half, outputs = 0, 0, 0, []
    while done < N:
        stand = min(max(T - 2, 1), N - done)
        queries = [jnp.concatenate([x[:, done : done + stand], -x[:, : T - stand]], axis=1) for x in (qkv, beta)]
        decays = jnp.concatenate([g[:, done : done + stand], 2 * g[:, : T - stand]], axis=1)
        o, state = function(state, verify_rows(B, T, accepted, half), queries[0], decays, queries[1])
        outputs.append(o[:, :stand])
        done, accepted, half = done + stand, stand, 1 - half
    _, state = function(state, verify_rows(B, 1, accepted, half), *(x[:, :1] for x in texts))
    return jnp.concatenate(outputs, axis=1), state


def seconds(step: Callable, carried, sizes: Sizes) -> float:
    """Median time of ``step(i, carried)`` in a loop on the device, which hands on what it carries, in place."""
    loop = jax.jit(lambda carried: jax.lax.fori_loop(0, sizes.calls, step, carried), donate_argnums=0)
    carried = jax.block_until_ready(loop(carried))
    times = []
    for _ in range(sizes.repeats):
        started = time.perf_counter()
        carried = jax.block_until_ready(loop(carried))
        times.append(time.perf_counter() - started)
    return statistics.median(times) / sizes.calls


def time_verify(sizes: Sizes, B: int, T: int, interpret: bool, tiling: VerifyTiling, convolved: bool) -> float:
    """Seconds of a layer's pass, in which all but two query tokens of the last one are folded in.

    Args:
      convolved: whether the convolution is in it.
    """
    layers = layers_of(sizes, B)
    queries, weight = tokens_of(sizes.heads, B, T), jnp.ones((W, sizes.heads.channels), jnp.bfloat16)

    def step(i, carried):
        states, o = carried
        rows, new = verify_rows(B, T, max(T - 2, 1), i % 2), []
        for state in states:
            qkv = queries[0] + (o[0, 0, 0, 0] * 0).astype(queries[0].dtype) if convolved else queries[0]
            if convolved:
                qkv, columns = convolve_verify_kernel(state.columns, rows, qkv, weight, interpret=interpret)
                state = dataclasses.replace(state, columns=columns)
            o, state = verify_kernel(state, rows, qkv, *queries[1:], tiling=tiling, interpret=interpret)
            new.append(state)
        return new, o

    states = [init_state(B, sizes.heads, W, MOST_TOKENS, jnp.bfloat16) for _ in range(layers)]
    o = jnp.zeros((B, T, sizes.heads.values, sizes.heads.value_size), jnp.bfloat16)
    return seconds(step, (states, o), sizes) / layers


def layers_of(sizes: Sizes, B: int) -> int:
    """So many that their states are several times as large as the L2 cache."""
    return min(max(int(L2_BYTES / state_bytes(sizes.heads, B)), 2), sizes.most_layers)


def state_bytes(heads: DeltaHeads, B: int) -> int:
    return 4 * B * heads.values * heads.key_size * heads.value_size


def time_prefill(sizes: Sizes, interpret: bool, tiling: PrefillTiling) -> float:
    """Seconds of a prompt of one row in one layer, the convolution left out."""
    queries, rows = tokens_of(sizes.heads, 1, sizes.segment), prefill_rows(1, sizes.segment, False)

    def step(_, carried):
        o, state = prefill_kernel(carried[1], rows, *queries, tiling=tiling, interpret=interpret)
        return o, state

    o = jnp.zeros((1, sizes.segment, sizes.heads.values, sizes.heads.value_size), jnp.bfloat16)
    state = init_state(1, sizes.heads, W, MOST_TOKENS, jnp.bfloat16)
    sizes = dataclasses.replace(sizes, calls=sizes.prompt // sizes.segment)
    return seconds(step, (o, state), sizes) * sizes.calls


def time_convolution(sizes: Sizes, interpret: bool) -> float:
    """Seconds of the convolution of a prompt in one layer, whose inputs have gates behind them, as in a model."""
    heads, count = sizes.heads, sizes.segment // CHUNK
    rows, taps = chain_rows(1, (CHUNK,) * count), taps_of(heads, jnp.bfloat16)
    width = heads.channels + heads.values * heads.value_size
    x = jax.random.normal(jax.random.key(4), (count, CHUNK, width), jnp.bfloat16)

    def step(_, carried):
        _, columns, x = carried
        return *convolve_prefill_kernel(columns, rows, x, taps, interpret=interpret), x

    y, columns = jnp.zeros_like(x[:, :, : heads.channels]), init_state(1, heads, W, MOST_TOKENS, x.dtype).columns
    return seconds(step, (y, columns, x), sizes) * (sizes.prompt // sizes.segment)


def prefill_floor(sizes: Sizes) -> float:
    """Seconds that the products of a prompt take at least."""
    _, values, Dk, Dv = sizes.heads
    of_keys, of_values, of_states = CHUNK * CHUNK * 2 * Dk, CHUNK * CHUNK * 2 * Dv, CHUNK * 3 * Dk * Dv  # multiply-adds
    return 2 * (of_keys + 6 * of_values + 3 * of_states) * values * (sizes.prompt / CHUNK) / FLOPS


def measure(sizes: Sizes, interpret: bool, result: results.Result):
    """Print a line for each time and put it into ``result``."""
    rate = result.device["bandwidth"]
    print(f"\n{sizes.heads}, bfloat16; states at {rate / 1e9:,.0f} GB/s; times in us")
    print(f"{'what':<34} {'floor':>8} {'time':>8} {'ratio':>6} {'with convolution':>17}")

    def save(key: str, floor: float, took: float, whole: float | None):
        beside = "" if whole is None else f"{1e6 * whole:>17.1f}"
        print(f"{key:<34} {1e6 * floor:>8.1f} {1e6 * took:>8.1f} {took / floor:>6.2f} {beside}", flush=True)
        result.measured[key], result.floors[key] = 1e6 * took, 1e6 * floor
        result.details[key] = {"unit": "us", "with_convolution": None if whole is None else 1e6 * whole}

    for B, T in itertools.product(sizes.rows, sizes.queries):
        alone, whole = (time_verify(sizes, B, T, interpret, verifies.TILING, convolved) for convolved in (False, True))
        save(f"verify, B = {B}, T = {T}", 2 * state_bytes(sizes.heads, B) / rate, alone, whole)
    took = time_prefill(sizes, interpret, prefills.tiling_of(sizes.heads.values, sizes.heads.value_size))
    save(f"prefill, {sizes.prompt} tokens", prefill_floor(sizes), took, None)
    floor = 2 * 2 * sizes.prompt * sizes.heads.channels / rate
    save(f"prefill convolution, {sizes.prompt} tokens", floor, time_convolution(sizes, interpret), None)


VERIFY_TILINGS = [
    *itertools.product((8, 16, 32), (16, 32, 64, 128), (1,)),
    *itertools.product((32, 64), (32, 64), (2, 4)),
]
PREFILL_TILINGS = [
    *itertools.product((32, 64), (32, 64), (32,), (4, 8), (4, 8), (1, 2, 3)),
    *itertools.product((16, 32, 64), (32,), (16, 64, 128), (4, 8), (4,), (2,)),
]


def sweep(sizes: Sizes, interpret: bool, until: float):
    """Print the best few tilings; none is begun after ``until``, a time of the monotonic clock."""
    timed = {f"verify, B = {B}, T = 5": (VERIFY_TILINGS, B) for B in sizes.rows} | {"prefill": (PREFILL_TILINGS, None)}
    for name, (tilings, B) in timed.items():
        times = []
        for tiling in tilings:
            if time.monotonic() > until:
                break
            try:
                if B is None:
                    took = time_prefill(sizes, interpret, PrefillTiling(*tiling))
                else:
                    took = time_verify(sizes, B, 5, interpret, VerifyTiling(*tiling), convolved=False)
            except jax.errors.JaxRuntimeError:  # more shared memory than a multiprocessor has
                continue
            times.append((round(1e6 * took, 1), tiling))
        print(name, sorted(times)[:6], f"of {len(times)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small sizes, interpreted kernels, any machine")
    parser.add_argument("--sweep", action="store_true", help="time other tilings too, for up to --seconds")
    parser.add_argument("--seconds", type=float, default=240, help="begin no further timing of a sweep after so long")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the result there")
    args = parser.parse_args()
    if not args.smoke and jax.default_backend() != "gpu":
        parser.error("no GPU: the kernels are compiled for NVIDIA GPUs; --smoke runs a small interpreted version here")
    sizes, until = SMOKE if args.smoke else Sizes(), time.monotonic() + args.seconds
    good = check(sizes.heads, args.smoke)
    rates, rate = bandwidth.for_floors(None)
    result = results.begin("delta_net", {"heads": sizes.heads._asdict(), "smoke": args.smoke}, rate, rates)
    measure(sizes, args.smoke, result)
    if args.json:
        results.write(result, args.json)
    if args.sweep:
        sweep(sizes, args.smoke, until)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
