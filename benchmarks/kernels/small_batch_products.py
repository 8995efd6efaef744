"""Products of few tokens with weights of eight and four bits, in microseconds beside those of bfloat16.

    python -m benchmarks.kernels.small_batch_products                     # four minutes; needs a GPU
    python -m benchmarks.kernels.small_batch_products --weights 4096x14336 --tokens 1 2 5 --forms bf16 int4 --seconds 60
    python -m benchmarks.kernels.small_batch_products --tune              # tries tilings of the kernel, and prints the best
    python -m benchmarks.kernels.small_batch_products --smoke             # tiny and anywhere, with meaningless times

A line is a weight and a number of tokens. Floors are the times in which weights of sixteen, eight and four bits can be read
once. The other columns say how the product is computed: in bfloat16 as XLA does it; in int8 as XLA does it, with the
weight as the right operand and as the left one; by the kernel of ``jspec.pallas.matmul.weight_only``; and for tokens
that are rounded to int8, by XLA and by the kernel of ``jspec.pallas.matmul.w8a8``. The launch that rounds them is not
timed. The kernel for bfloat16 is that of ``jspec.pallas.matmul.bf16``. Where results come in parts, their sum is timed,
too; in a model the norm computes it.
Every result is compared with that of the definition, and a time with a ``!`` is of one that differs.

``--tune`` starts from the tiling that the kernel has. It changes one field at a time, and goes on from the faster one."""

import argparse
import dataclasses
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels import bandwidth
from benchmarks.shapes import LLAMA_1B, LLAMA_8B
from jspec.config import ModelConfig
from jspec.engine.runner.compile import decode_options
from jspec.pallas.matmul.bf16 import bf16_matmul_kernel
from jspec.pallas.matmul.partial_sums import reduce_partial_sums
from jspec.pallas.matmul.quantize_activations import QuantizedActivations, quantize_tokens_reference
from jspec.pallas.matmul.reference import matmul_reference
from jspec.pallas.matmul.small_batch import small_batch_tiling
from jspec.pallas.matmul.table import TABLE, Product
from jspec.pallas.matmul.tiling import MatmulTiling
from jspec.pallas.matmul.w8a8 import w8a8_matmul_kernel, w8a8_matmul_reference
from jspec.pallas.matmul.weight_only import weight_only_matmul_kernel, weight_only_matmul_reference, weight_only_tiling
from jspec.quantization.formats import format_of
from jspec.quantization.weight import Weight, random_weight


def weights_of(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Name -> [out, in] of the weights of a layer, and of the output head's."""
    D, F, H = config.hidden_size, config.intermediate_size, config.head_dim
    heads = config.num_heads * H
    return {
        "qkv": (heads + 2 * config.num_kv_heads * H, D),
        "o": (D, heads),
        "gate and up": (2 * F, D),
        "down": (D, F),
        "output head": (config.vocab_size, D),
    }


TOKENS = (1, 5, 16, 64, 80, 320)
SHAPES = [shape for name, shape in weights_of(LLAMA_8B).items() if name != "output head"]
SHAPES += [weights_of(LLAMA_1B)[name] for name in ("gate and up", "down")]
SHAPES += [(32_768, inputs) for inputs in (2048, 4096)]  # output heads of a draft vocabulary
ENOUGH = 1 << 28  # bytes of weights that a timed program reads, five times what the L2 cache holds
COPIES = 4, 48  # of a weight, at least and at most
REPEATS, SECONDS = 5, 0.02  # timings, and how long each takes at least
CLOSE = {"bf16": 2**-7, "rounded": 2**-7}  # of the largest number: how far a result may be from that of the definition
CLOSE |= dict.fromkeys(("int8", "fp8", "int4", "fp8_block", "mxfp8"), 1e-4)  # these are not rounded
BYTES = {"bf16": 2.0, "int8": 1.0, "fp8": 1.0, "rounded": 1.0, "int4": 0.5 + 2 / 128}  # of a weight
BYTES |= {"fp8_block": 1 + 4 / 128, "mxfp8": 1 + 1 / 32}
IN_BLOCKS = "fp8_block", "mxfp8"  # of eight bits
# What ``--tune`` tries in place of what a tiling has, one field or two after the other.
CHOICES: Sequence[dict[str, Sequence[Any]]] = (
    {"outputs": (32, 64, 128), "num_warps": (4, 8)},
    {"inputs": (64, 128, 256, 512), "ordered": (False, True)},
    {"num_splits": (1, 2, 4, 8, 16)},
    {"num_stages": (2, 3, 4, 5, 6)},
    {"tokens": (16, 32, 64, 128, 256)},
)
STREAMED_CHOICES: Sequence[dict[str, Sequence[Any]]] = (
    {"outputs": (32, 64, 128), "num_splits": (1, 2, 4, 8)},
    {"inputs": (64, 128, 256, 512), "num_stages": (3, 4, 5, 6)},
    {"outputs": (16, 32, 64), "weight_first": (False, True)},
    {"tokens": (16, 32, 64, 128), "num_warps": (4, 8)},
)


def floats_by_xla(x, weight: Weight):
    """As ``jspec.pallas.matmul`` has it without a kernel: that of a single token as a reduction, if the weight is large."""
    product = Product(x, weight, dtype=x.dtype)
    rows = (row for row in TABLE if row.name in ("one token, reduction", "XLA") and row.refusal(product) is None)
    return next(rows).compute(product)


def by_xla(x, weight: Weight):
    """The same of quantised weights: that of a single token as one of two, of which the other is zero."""
    if len(x) > 1:
        return weight_only_matmul_reference(x, weight)
    return weight_only_matmul_reference(jnp.pad(x, ((0, 1), (0, 0))), weight)[:1]


def from_the_left(x, weight: Weight):
    """The same with the weight as the left operand."""
    numbers, of_inputs = weight.numbers.astype(x.dtype), (((1,), (1,)), ((), ()))
    return (jax.lax.dot_general(numbers, x, of_inputs, preferred_element_type=jnp.float32) * weight.scale[:, None]).T


def in_float32(x: QuantizedActivations, weight: Weight):
    """``w8a8_matmul_reference`` in float32, which is close, and owes nothing to a product of integers."""
    numbers, wide = x.numbers.astype(jnp.float32), weight.numbers.astype(jnp.float32)
    return (matmul_reference(numbers, wide) * x.scale[:, None] * weight.scale[None]).astype(x.dtype)


def streamed_kernel(x, weight: Weight, tiling: MatmulTiling | None = None, interpret=False):
    """The kernel of rounded tokens, or of a weight of floats, and the sum if that gives parts."""
    tiling = tiling or streamed_tiling(x.shape[0], *weight.shape, weight.numbers.dtype.itemsize)
    if weight.form is None:
        y = bf16_matmul_kernel(x, weight.numbers, tiling=tiling, interpret=interpret)
    else:
        y = w8a8_matmul_kernel(x, weight.numbers, weight.scale, tiling=tiling, interpret=interpret)
    return reduce_partial_sums(y, x.dtype)


def streamed_tiling(tokens: int, outputs: int, inputs: int, itemsize: int) -> MatmulTiling:
    """That of a map in a layer. What ``out`` and ``down`` add to the residual stream, and no other, may come in parts."""
    return small_batch_tiling(tokens, outputs, inputs, outputs <= inputs, itemsize)


def rounded_by_xla(x: QuantizedActivations, weight: Weight):
    return w8a8_matmul_reference(x, weight.numbers, weight.scale)


FORMS: dict[str, tuple[str, Callable]] = {  # what is multiplied, and how the product is computed
    "bf16": ("bf16", floats_by_xla),
    "bf16, kernel": ("bf16", streamed_kernel),
    "int8, XLA": ("int8", by_xla),
    "int8, XLA, left": ("int8", from_the_left),
    "int8": ("int8", weight_only_matmul_kernel),
    "fp8": ("fp8", weight_only_matmul_kernel),
    "int4": ("int4", weight_only_matmul_kernel),
    "fp8_block": ("fp8_block", weight_only_matmul_kernel),
    "mxfp8": ("mxfp8", weight_only_matmul_kernel),
    "rounded, XLA": ("rounded", rounded_by_xla),
    "rounded": ("rounded", streamed_kernel),
}
KERNELS = weight_only_matmul_kernel, streamed_kernel
STREAMED = "bf16", "rounded"  # what the second multiplies
DEFINITIONS = {"bf16": floats_by_xla, "rounded": in_float32}  # and that of the others is the reference


@functools.lru_cache(maxsize=len(BYTES))
def made(shape: tuple[int, int], kind: str, copies: int) -> list[Weight]:
    """Random weights of one shape."""
    form = format_of({"bf16": None, "rounded": "int8"}.get(kind, kind))
    make = jax.jit(lambda key: random_weight(key, shape, shape[1] ** -0.5, dtype=jnp.bfloat16, form=form))
    return [make(key) for key in jax.random.split(jax.random.key(0), copies)]


class Case:
    """A weight, a format and a number of tokens, of which several products are computed and timed."""

    def __init__(self, shape: tuple[int, int], kind: str, tokens: int, smoke: bool):
        self.shape, self.kind, self.tokens, self.smoke = shape, kind, tokens, smoke
        least, most = (1, 1) if smoke else COPIES
        self.weights = made(shape, kind, min(most, max(least, int(ENOUGH / (shape[0] * shape[1] * BYTES[kind])))))
        x = jax.random.normal(jax.random.key(1), (tokens, shape[1]), jnp.bfloat16)
        self.x: Any = jax.jit(quantize_tokens_reference)(x) if kind == "rounded" else x
        # XLA would make one product of several that read the same x.
        alone: dict[str, str | int] = {"xla_gpu_dot_merger_threshold_mb": 0}
        self.options = decode_options(jax.tree.leaves(self.weights), tokens) | alone

    @functools.cached_property
    def wanted(self) -> jax.Array:
        """The product with the first weight by its definition."""
        product = DEFINITIONS.get(self.kind, weight_only_matmul_reference)
        return jax.jit(product, compiler_options={"xla_gpu_autotune_level": 0})(self.x, self.weights[0])

    def compiled(self, form: Callable) -> Callable:
        """The program that computes the products with all of the weights."""
        if self.smoke and form in KERNELS:
            form = functools.partial(form, interpret=True)

        def all_of_them(x, weights):
            first, *others = (form(x, weight) for weight in weights)
            # To hand over many results would take longer than to compute those of small products.
            return first, functools.reduce(jnp.add, others, jnp.zeros_like(first))

        products = jax.jit(all_of_them, compiler_options=self.options)
        return products.lower(self.x, self.weights).compile()

    def microseconds(self, compiled: Callable) -> tuple[float, bool]:
        """How long one of the products takes, and whether the first of them is right."""
        call = functools.partial(compiled, self.x, self.weights)
        got = jnp.asarray(call()[0], jnp.float32)
        wanted = jnp.asarray(self.wanted, jnp.float32)
        right = bool(jnp.max(jnp.abs(got - wanted)) <= CLOSE[self.kind] * jnp.max(jnp.abs(wanted)))
        calls = 1
        if not self.smoke:
            calls += int(SECONDS / self._seconds(call, 1))
        took = [self._seconds(call, calls) for _ in range(1 if self.smoke else REPEATS)]
        return 1e6 * statistics.median(took) / len(self.weights), right

    def _seconds(self, call: Callable, calls: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready([call() for _ in range(calls)])
        return (time.perf_counter() - began) / calls


def table(shapes, tokens, names: Sequence[str], rate: float, until: float, smoke: bool):
    """Print a line for each weight and each number of tokens."""
    kinds = list(dict.fromkeys(FORMS[name][0] for name in names))
    with_floor = [kind for kind in kinds if kind not in ("fp8", "rounded")]
    print(_line("us", *(f"floor {kind}" for kind in with_floor), *names), flush=True)
    with ThreadPoolExecutor(8) as pool:
        for shape, count in itertools.product(shapes, tokens):
            if time.monotonic() > until:
                print("out of time")
                return
            cases = {kind: Case(shape, kind, count, smoke) for kind in kinds}
            of_names = {
                name: functools.partial(cases[kind].compiled, form)
                for name, (kind, form) in FORMS.items()
                if name in names
            }
            # XLA times its own products while it compiles them, so these are compiled alone.
            ahead = {name: pool.submit(of_names[name]) for name in names if FORMS[name][1] in KERNELS}
            floors = (1e6 * shape[0] * shape[1] * BYTES[kind] / rate for kind in with_floor)
            cells = [f"{floor:.1f}" for floor in floors]
            for name in names:
                compiled = ahead[name].result() if name in ahead else of_names[name]()
                took, right = cases[FORMS[name][0]].microseconds(compiled)
                cells.append(f"{took:.1f}" + ("" if right else "!"))
            print(_line(f"{list(shape)} x {count}", *cells), flush=True)


def tiling_of(case: Case) -> Any:
    """The tiling that the kernel has for the product."""
    if case.kind in STREAMED:
        return streamed_tiling(case.tokens, *case.shape, case.weights[0].numbers.dtype.itemsize)
    return weight_only_tiling(case.tokens, *case.shape, 4 if case.kind == "int4" else 8, case.kind in IN_BLOCKS)


def neighbours(case: Case, tiling: Any, choice: dict[str, Sequence[Any]]) -> Iterator[Any]:
    """The tilings that differ in the fields of ``choice``, and may be of use."""
    for values in itertools.product(*choice.values()):
        other = dataclasses.replace(tiling, **dict(zip(choice, values, strict=True)))
        fits_registers = other.outputs * other.tokens <= 128 * 32 * other.num_warps
        is_read = (128 if case.kind in ("int4", *IN_BLOCKS) else 64) <= other.inputs <= case.shape[1]
        splits = other.num_splits if case.kind in STREAMED else 1
        is_read &= splits == 1 or case.shape[1] % (splits * other.inputs) == 0
        # Four warps of Hopper multiply 64 rows of the left operand, and so half of one with 32.
        fills = case.kind not in STREAMED or (other.outputs if other.weight_first else other.tokens) >= 64
        most_tokens = max(64 if case.kind in STREAMED else 16, 2 * case.tokens - 1)
        if fits_registers and is_read and fills and other.tokens <= most_tokens:
            yield other


def tune(case: Case) -> list[tuple[float, Any]]:
    """Tilings and their times, the fastest first."""
    best = tiling_of(case)
    timings: dict[Any, float] = {}
    kernel, choices = (
        (streamed_kernel, STREAMED_CHOICES) if case.kind in STREAMED else (weight_only_matmul_kernel, CHOICES)
    )

    def compiled(tiling: Any):
        try:
            return tiling, case.compiled(functools.partial(kernel, tiling=tiling, interpret=case.smoke))
        except Exception as error:  # does not fit, or does not compile
            print(f"  {tiling}: {str(error).splitlines()[0][:90]}", flush=True)
            return tiling, None

    with ThreadPoolExecutor(8) as pool:
        for choice in ({}, *choices):
            others = [one for one in neighbours(case, best, choice) if one not in timings] if choice else [best]
            for tiling, program in list(pool.map(compiled, others)):
                if program is not None:
                    timings[tiling], right = case.microseconds(program)
                    if not right:
                        print(f"  {tiling} is wrong", flush=True)
                        del timings[tiling]
            best = min(timings, key=timings.__getitem__, default=best)
    return sorted(((took, tiling) for tiling, took in timings.items()), key=lambda one: one[0])


def tune_all(shapes, tokens, kinds, rate: float, until: float, smoke: bool):
    """Print the best tilings of each weight and each number of tokens, and the time of the one that it has."""
    for shape, count, kind in itertools.product(shapes, tokens, kinds):
        if time.monotonic() > until:
            print("out of time")
            return
        case = Case(shape, kind, count, smoke)
        timings = tune(case)
        now = tiling_of(case)
        has = next((took for took, tiling in timings if tiling == now), float("nan"))
        floor = 1e6 * shape[0] * shape[1] * BYTES[kind] / rate
        print(f"{kind} {list(shape)} x {count}: floor {floor:.1f} us, now {has:.1f}", flush=True)
        for took, tiling in timings[:4]:
            print(f"  {took:8.1f}  {tiling}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", type=shape_of, metavar="OUTxIN", default=SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument(
        "--forms", nargs="+", choices=FORMS, help="these columns, and without this rounded and int4 to tune"
    )
    parser.add_argument("--tune", action="store_true", help="tilings of those of the forms that are the kernel's")
    parser.add_argument("--seconds", type=float, default=240, help="nothing is begun later than this")
    parser.add_argument("--bandwidth", type=float, default=bandwidth.ASSUMED, help="bytes per second for the floors")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, meaningless times")
    args = parser.parse_args()
    if not args.smoke and jax.default_backend() != "gpu":
        parser.error("no GPU: there is nothing to learn from the products of this machine; --smoke runs a tiny version")
    shapes, tokens = ([(64, 256)], [3]) if args.smoke else (args.weights, args.tokens)
    until = time.monotonic() + args.seconds
    if args.tune:
        forms = args.forms or ("rounded", "int4")
        kinds = [FORMS[name][0] for name in forms if FORMS[name][1] in KERNELS]
        tune_all(shapes, tokens, kinds, args.bandwidth, until, args.smoke)
    else:
        table(shapes, tokens, args.forms or list(FORMS), args.bandwidth, until, args.smoke)
    return 0


def shape_of(text: str) -> tuple[int, int]:
    """(out, in) of ``4096x14336``."""
    out, inputs = text.split("x")
    return int(out), int(inputs)


def _line(first: str, *cells: str) -> str:
    return f"{first:<22}" + "".join(f"{cell:>16}" for cell in cells)


if __name__ == "__main__":
    sys.exit(main())
