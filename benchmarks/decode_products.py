"""The matrix products of a decode pass, in microseconds beside the time in which their weights can be read once.

    python -m benchmarks.decode_products                  # a whole Llama-3.1-8B on one GPU; needs a GPU
    python -m benchmarks.decode_products --shards 2       # what one of two GPUs multiplies; needs one GPU, too
    python -m benchmarks.decode_products --only chain     # or weights, or added
    python -m benchmarks.decode_products --only weights --weights 4096x8192 6144x8192 --forms 1 reduced
    python -m benchmarks.decode_products --smoke          # tiny and anywhere, with meaningless times

In the first table a line is a weight, and a column says how its product is computed: with one token as jspec does it, as a
reduction, as the matrix product that XLA makes, and as the product of 2, 8 or 16 tokens of which all but the first are zero;
then with 5 and with 16 tokens. The second table has the products of 8 layers and of the output head one after another, with
nothing between them but the activation. The third has those products that are added to the residual stream, together with
the norm that adds them: as they are, and as a batch of some parts of their inputs, whose sums the norm adds up as well."""

import argparse
import dataclasses
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from benchmarks import bandwidth
from benchmarks.shapes import LLAMA_8B, TINY
from jspec.config import ModelConfig, Shards
from jspec.engine.runner.compile import decode_options
from jspec.models.layers import _reduction, project
from jspec.pallas.norm.rms_norm import add_norm

LAYERS = 8
ENOUGH = 1 << 30  # bytes of weights that a timed program reads, so that none of them is in the L2 cache
REPEATS, CALLS = 7, 20  # timings, and calls of the program in each

Form = Callable[[jax.Array, jax.Array], jax.Array]  # ([tokens, in], [out, in]) -> [tokens, out]


def padded(tokens: int) -> Form:
    """The product of one token, computed as one of several tokens of which the others are zero."""
    return lambda x, weight: project(jnp.pad(x, ((0, tokens - 1), (0, 0))), weight)[:1]


ONE_TOKEN: Mapping[str, Form] = {
    "1": project,
    "reduced": _reduction,
    "product": lambda x, weight: jnp.einsum("...i,oi->...o", x, weight),
    "1 of 2": padded(2),
    "1 of 8": padded(8),
    "1 of 16": padded(16),
}
FORMS: Mapping[str, tuple[Form, int]] = {  # how it is computed, and for how many tokens
    **{name: (form, 1) for name, form in ONE_TOKEN.items()},
    **{str(tokens): (project, tokens) for tokens in (5, 16)},
}


PARTS = (1, 2, 4, 8)


def added(parts: int) -> Callable:
    """What the norm behind a product gives, which adds it to the residual stream, in parts of the inputs or not."""

    def form(stream, x, weight, norm):
        if parts == 1:
            y = project(x, weight)
        else:
            x, weight = (one.reshape(len(one), parts, -1) for one in (x, weight))
            sums = jax.lax.dot_general(x, weight, (((2,), (2,)), ((1,), (1,))), preferred_element_type=jnp.float32)
            y = jnp.moveaxis(sums, 0, 1)  # [tokens, parts, out]
        return add_norm(stream, y, norm, None, 1e-5, "rms")[1]

    return form


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


@functools.cache
def made(shape: tuple[int, int], dtype: str, seed: int) -> jax.Array:
    """A random weight."""
    make = jax.jit(lambda key: jax.random.normal(key, shape, dtype) * jnp.asarray(shape[1] ** -0.5, dtype))
    return make(jax.random.key(seed))


def seconds(function: Callable, weights: Sequence[jax.Array], x: jax.Array) -> float:
    """Of a program that reads its weights once."""
    compiled = jax.jit(function, compiler_options=decode_options(weights, len(x))).lower(weights, x).compile()
    jax.block_until_ready(compiled(weights, x))
    took = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        jax.block_until_ready([compiled(weights, x) for _ in range(CALLS)])
        took.append(time.perf_counter() - began)
    return statistics.median(took) / CALLS


def of_one_weight(form: Form, shape: tuple[int, int], tokens: int, dtype: str, enough: int) -> float:
    """Seconds of a product with a weight, one of many of the same shape."""
    copies = max(2, enough // (shape[0] * shape[1] * jnp.dtype(dtype).itemsize))
    weights = [made(shape, dtype, seed) for seed in range(copies)]
    x = jax.random.normal(jax.random.key(1), (tokens, shape[1]), dtype)
    return seconds(lambda weights, x: [form(x, weight) for weight in weights], weights, x) / copies


def of_one_addition(parts: int, shape: tuple[int, int], tokens: int, dtype: str, enough: int) -> float:
    """Seconds of a product with a weight and of the norm behind it."""
    copies = max(2, enough // (shape[0] * shape[1] * jnp.dtype(dtype).itemsize))
    weights = [made(shape, dtype, seed) for seed in range(copies)]
    x, stream = (jax.random.normal(jax.random.key(1), (tokens, size), dtype) for size in (shape[1], shape[0]))

    def normed(weights, x):
        return functools.reduce(lambda y, weight: added(parts)(y, x, weight, stream[0]), weights, stream)

    return seconds(normed, weights, x) / copies


def chain(form: Form, config: ModelConfig, layers: int, tokens: int, dtype: str) -> float:
    """Seconds of the products of some layers, and of the output head, each of which reads what the one before it gave."""
    *shapes, of_head = weights_of(config).values()
    weights = [made(shape, dtype, layer) for layer in range(layers) for shape in shapes]
    heads = config.num_heads * config.head_dim

    def logits(weights, x):
        for qkv, o, gate_up, down in zip(*(weights[i:-1:4] for i in range(4)), strict=True):
            x = form(form(x, qkv)[:, :heads], o)
            gate, up = jnp.split(form(x, gate_up), 2, axis=-1)
            x = form(jax.nn.silu(gate) * up, down)
        return form(x, weights[-1])

    x = jax.random.normal(jax.random.key(1), (tokens, config.hidden_size), dtype)
    return seconds(logits, [*weights, made(of_head, dtype, 0)], x)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=1, help="over how many GPUs the model is split")
    parser.add_argument("--only", choices=("weights", "chain", "added"))
    parser.add_argument("--weights", nargs="+", type=shape_of, metavar="OUTxIN", help="these in place of the model's")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="these columns")
    parser.add_argument("--bandwidth", type=float, help="bytes per second for the floors, instead of measuring")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, meaningless times")
    args = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    if not (args.smoke or on_gpu):
        parser.error("no GPU: there is nothing to learn from the products of this machine; --smoke runs a tiny version")
    whole = TINY if args.smoke else LLAMA_8B
    config = whole if args.shards == 1 else Shards(args.shards).local(whole)
    if args.shards > 1 and not args.smoke:
        config = dataclasses.replace(config, vocab_size=Shards(args.shards).vocabulary(whole.vocab_size))
    dtype, enough = ("bfloat16", ENOUGH) if on_gpu else ("float32", 1)
    rates, rate = bandwidth.for_floors(args.bandwidth)
    print(f"{bandwidth.describe(rates)}; floors at {rate / 1e9:,.0f} GB/s", flush=True)
    forms = {name: FORMS[name] for name in args.forms}
    floor = lambda shape: shape[0] * shape[1] * jnp.dtype(dtype).itemsize / rate  # noqa: E731
    if args.only in (None, "weights"):
        print(_line("us", "floor", *forms), flush=True)
        weights = weights_of(config).items() if args.weights is None else [("", shape) for shape in args.weights]
        for name, shape in weights:
            times = [of_one_weight(form, shape, tokens, dtype, enough) for form, tokens in forms.values()]
            print(
                _line(f"{name} {list(shape)}".strip(), *(f"{1e6 * x:.1f}" for x in (floor(shape), *times))), flush=True
            )
    if args.only in (None, "chain"):
        layers = 2 if args.smoke else LAYERS
        *others, head = weights_of(config).values()
        least = layers * sum(map(floor, others)) + floor(head)
        print(_line("us", "floor", *forms), flush=True)
        times = [chain(form, config, layers, tokens, dtype) for form, tokens in forms.values()]
        print(_line(f"{layers} layers and head", *(f"{1e6 * x:.0f}" for x in (least, *times))), flush=True)
    if args.only in (None, "added"):
        print(_line("us, with the norm behind it", "floor", *(f"{parts} parts" for parts in PARTS)), flush=True)
        for name, tokens in itertools.product(("o", "down"), (5, 8)):
            shape = weights_of(config)[name]
            times = [of_one_addition(parts, shape, tokens, dtype, enough) for parts in PARTS]
            cells = (f"{1e6 * x:.1f}" for x in (floor(shape), *times))
            print(_line(f"{name} {list(shape)} x {tokens}", *cells), flush=True)
    return 0


def shape_of(text: str) -> tuple[int, int]:
    """(out, in) of ``4096x14336``."""
    out, inputs = text.split("x")
    return int(out), int(inputs)


def _line(first: str, *cells: str) -> str:
    return f"{first:<30}" + "".join(f"{cell:>10}" for cell in cells)


if __name__ == "__main__":
    sys.exit(main())
