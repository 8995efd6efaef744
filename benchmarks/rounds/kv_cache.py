"""What a cache of keys and values in eight bits costs and saves: how far it moves the distribution of the shipped target and
the acceptance of its drafters, and how long attention and rounds take over long texts.

    python -m benchmarks.rounds.kv_cache --only quality --json FILE     # needs no GPU; a few minutes on two cores
    python -m benchmarks.rounds.kv_cache --only attention --json FILE   # the kernel of a round, 16 rows of 32,768 tokens
    python -m benchmarks.rounds.kv_cache --only rounds --quantization fp8 --json FILE  # rounds of as many
    python -m benchmarks.rounds.kv_cache --only rounds --kinds fp8 none --rows 8 --context 16384   # others
    python -m benchmarks.rounds.kv_cache --only attention rounds --smoke  # tiny, anywhere, with meaningless times

A ``kind`` is ``fp8``, ``fp8_per_token_head``, or ``none``, the dtype of the model. The quality: KL(none || kind) in nats for
each token of texts that the target has written, and the share of tokens of which both have the same likeliest next one;
acceptance lengths over the same prompts. Keys of the result are ``kl, <kind>`` and ``acceptance, <drafter>, T =
<temperature>, <kind>``. Attention: a launch of the kernel that rotates, writes and attends, and what merges its splits, at
the sizes of a layer of the shape, in microseconds; a row has 1 or 5 query tokens. Keys are ``attention, T = <tokens>,
<kind>``. Rounds: plain decoding and verify passes of 5 query tokens, in milliseconds. Keys are ``decode, <kind>`` and
``verify 5, <kind>``.

Keys and values of Llama-3.1-8B take 64 GiB for 16 rows of 32,768 tokens in bfloat16. Beside them there is room for weights
in FP8 in the memory of one H100, if JAX may use nearly all of it (XLA_PYTHON_CLIENT_MEM_FRACTION=0.97)."""

import argparse
import dataclasses
import pathlib
import statistics
import time
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jspec
from benchmarks.kernels import bandwidth
from benchmarks.report import results
from benchmarks.rounds.bench import Bench
from benchmarks.rounds.programs import PAGE, Decoding, Forward, filled, kv_rounding, last_positions, tables
from benchmarks.rounds.quality import Report, measure_acceptance, measure_divergence
from benchmarks.shapes import SHAPES
from jspec.commands.demo import FAMILY
from jspec.config.engine import FP8_CACHES
from jspec.models.cache_pools import cache_shape, init_pool, with_rounding
from jspec.models.kv_cache import PagedView
from jspec.models.params import DTYPES
from jspec.pallas.attention.reference import Rotation
from jspec.pallas.attention.spec import AttentionSpec

KINDS = ("none", *FP8_CACHES)
PARTS = ("quality", "attention", "rounds")
DRAFTERS = ("draft", "eagle", "eagle3")
CALLS = 16  # of the kernel in a timed program


def load(kind: str, draft: str | None = None, **how) -> jspec.LLM:
    """The family's target with such a cache, and one of its drafters."""
    cached = "auto" if kind == "none" else kind
    with warnings.catch_warnings():  # its checkpoint has no scales, and some drafters make fewer drafts
        warnings.filterwarnings("ignore", ".*holds no .* scales of keys and values", UserWarning)
        warnings.filterwarnings("ignore", "num_draft_tokens=", UserWarning)
        path = None if draft is None else FAMILY / draft
        return jspec.load(FAMILY / "target", path, kv_cache_dtype=cached, max_batch=8, max_len=256, **how)


def measure_quality(report: Report, smoke: bool):
    """How far each kind moves distributions and acceptance."""
    measure_divergence(report, load, "none", {f"kl, {kind}": ("none", kind) for kind in FP8_CACHES}, smoke)
    measure_acceptance(report, load, KINDS, DRAFTERS[-1:] if smoke else DRAFTERS, smoke)


def attention_program(shape: str, kind: str | None, dtype: str, what: Forward) -> tuple[Callable, Callable]:
    """``(kv, qkv) -> (kv, qkv)`` of ``CALLS`` launches, one after another, and what makes its arguments."""
    config = dataclasses.replace(SHAPES[shape].target, num_layers=1, windows=())
    N, G, H = config.num_heads, config.num_kv_heads, config.head_dim
    B, T, M = what.batch, what.width, what.capacity // PAGE
    positions, rounding = last_positions(what), kv_rounding(config, kind)
    view = PagedView(tables(B, M), positions, jnp.ones(positions.shape, bool))
    shapes = cache_shape(config) if rounding is None else with_rounding(cache_shape(config), rounding)
    angles = jax.random.uniform(jax.random.key(1), (B, T, H // 2))
    rotation = Rotation(jnp.cos(angles), jnp.sin(angles))

    def calls(kv, qkv):
        def one(_, carry):
            kv, qkv = carry
            out, kv = view.extend(qkv, rotation, kv, G, AttentionSpec())
            return kv, qkv.at[:, :, :N].set(out)  # the next launch waits for this one

        return jax.lax.fori_loop(0, CALLS, one, (kv, qkv))

    def fresh():
        [kv] = filled(init_pool(shapes, 1 + B * M, PAGE, DTYPES[dtype]))
        return kv, jax.random.normal(jax.random.key(0), (B, T, N + 2 * G, H), DTYPES[dtype])

    return calls, fresh


def measure_attention(report: Report, args, rate: float, dtype: str):
    """The kernel of a round, alone."""
    config = SHAPES[args.shape].target
    for width, kind in ((width, kind) for width in (1, 5) for kind in args.kinds):
        what = Forward(args.rows, width, args.context, args.context, CALLS)
        calls, fresh = attention_program(args.shape, None if kind == "none" else kind, dtype, what)
        compiled, state, seconds = jax.jit(calls, donate_argnums=(0, 1)), fresh(), []
        for _ in range(2 if args.smoke else 6):
            started = time.perf_counter()
            state = jax.block_until_ready(compiled(*state))
            seconds.append((time.perf_counter() - started) / CALLS)
        number, scale = (jnp.dtype(dtype).itemsize, 0) if kind == "none" else (1, 4 * (kind == FP8_CACHES[1]))
        read = args.rows * args.context * 2 * config.num_kv_heads * (config.head_dim * number + scale)
        key = f"attention, T = {width}, {kind}"
        report.add(key, 1e6 * statistics.median(seconds[1:]), "us", 1e6 * read / rate, bytes=read)
        del state


def measure_rounds(report: Report, args, rate: float, dtype: str):
    """Plain decoding, and verify passes, of the whole model."""
    bench = Bench(SHAPES[args.shape], dtype, rate, 1 if args.smoke else 3)
    new = 4 if args.smoke else 64
    for kind in args.kinds:
        how = {"quantization": args.quantization, "kv_cache": None if kind == "none" else kind}
        plain = Decoding(None, 0, args.rows, args.context - 4 * new, new, **how)
        narrow = Forward(args.rows, 5, args.context - PAGE, args.context, 2 if args.smoke else 16, **how)
        for name, what in (("decode", plain), ("verify 5", narrow)):
            timed = bench.time(what)
            more = {"kernels": timed.kernels, "what": str(what)}
            report.add(f"{name}, {kind}", 1e3 * timed.seconds, "ms", 1e3 * timed.floor, **more)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--quantization", choices=("int8", "fp8", "fp8_block"), help="of the weights in rounds; none")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=32768, help="tokens of a row; a multiple of 64")
    parser.add_argument("--bandwidth", type=float, help="bytes per second for floors; measured")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write a result to FILE")
    parser.add_argument("--smoke", action="store_true", help="tiny and anywhere, with meaningless times")
    args = parser.parse_args()
    if args.smoke:
        args.shape, args.rows, args.context = "tiny", 2, 4 * PAGE
    on_gpu = jax.default_backend() == "gpu"
    rates, rate = bandwidth.for_floors(args.bandwidth or (None if on_gpu else bandwidth.ASSUMED))
    dtype = "bfloat16" if on_gpu else "float32"
    settings = {name: getattr(args, name) for name in ("shape", "quantization", "rows", "context", "smoke")}
    report = Report(results.begin("kv_cache", settings | {"dtype": dtype}, rate, rates), args.json)
    if "quality" in args.only:
        measure_quality(report, args.smoke)
    if "attention" in args.only:
        measure_attention(report, args, rate, dtype)
    if "rounds" in args.only:
        measure_rounds(report, args, rate, dtype)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
