"""Products by ``jspec.pallas.matmul.matmul``: which numbers of tokens give a token the same bits, by which kernel, and how
fast."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.invariance.run import (
    Job,
    Run,
    compile_all,
    kernels_of,
    microseconds,
    picked,
    places_of,
    same_everywhere,
)
from benchmarks.kernels.lowering_ways import BYTES, weights_of, with_scales_of_outputs
from jspec.engine.runner.compile import decode_options
from jspec.pallas.dispatch import row_of
from jspec.pallas.matmul.few_tokens import tiling_of
from jspec.pallas.matmul.partial_sums import PartialSums
from jspec.pallas.matmul.small_batch import small_batch_tiling
from jspec.pallas.matmul.table import TABLE, Product, matmul
from jspec.pallas.matmul.weight_only import weight_only_tiling
from jspec.quantization.weight import Weight

TOKENS = (1, 2, 5, 8, 16, 17, 40, 64, 80, 320, 512, 640, 2048)
KINDS = ("bf16", "int4", "int8", "blocks", "nvfp4", "fp8", "mxfp4")
# [outputs, inputs], and whether the results are added to the residual stream, so that they may come in parts.
LLAMA = {
    "gate_up": ((28672, 4096), False),
    "down": ((4096, 14336), True),
    "qkv": ((6144, 4096), False),
    "o": ((4096, 4096), True),
}
OTHERS = {
    "head": ((128256, 4096), False),
    "27B down": ((5120, 17408), True),
    "27B qkvz": ((16384, 5120), False),
    "30B-A3B qkv": ((5120, 2048), False),
    "30B-A3B o": ((2048, 4096), True),
}
MOST_OF_HEAD = 640  # tokens: prefill has no logits
SMALL = {"down": ((256, 512), True)}
ROWS = 16  # tokens whose bits are compared: of one token alone, another order of sums may round to the same bits
LARGE, PRODUCTS = (
    300_000_000,
    12,
)  # the fewest bytes of a program's weights, which L2 does not hold, and the most weights


class Way(NamedTuple):
    """A product ``(x, weight) -> [tokens, outputs]`` or in parts ``[tokens, parts, outputs]``; see ``Job`` for the rest."""

    product: Callable
    options: Mapping[str, Any] = {}
    tuned: bool = False


class Measured(NamedTuple):
    """The sums of ``ROWS`` tokens in each of their places ``[ROWS, 3, outputs]``, microseconds, and the program."""

    rows: np.ndarray
    took: float
    program: Any

    @property
    def anywhere(self) -> bool:
        """Whether a token's bits are the same in all places, beside any neighbours."""
        return same_everywhere([self.rows[:, place] for place in range(self.rows.shape[1])])

    @property
    def first(self) -> np.ndarray:
        return self.rows[:, 0]


def weights_for(kind: str, shape: tuple[int, int], small: bool) -> list[Weight]:
    """Several weights of a form."""
    size = int(BYTES.get(kind, 0.5 if kind == "mxfp4" else 1) * shape[0] * shape[1])
    count = 1 if small else min(max(LARGE // size, 3), PRODUCTS)
    weights = weights_of(kind, shape, count)
    return [with_scales_of_outputs(weight) for weight in weights] if kind == "blocks" else weights


@functools.partial(jax.jit, static_argnums=(1, 2))
def tokens_of(number, tokens: int, inputs: int) -> jax.Array:
    """One of ``ROWS`` tokens, always the same, first, in the middle and last among others that are not."""
    one = jax.random.normal(jax.random.fold_in(jax.random.key(1), number), (inputs,), jnp.bfloat16)
    others = jax.random.fold_in(jax.random.key(2 + tokens), number)
    x = jax.random.normal(others, (tokens, inputs), jnp.bfloat16)
    return x.at[jnp.asarray(places_of(tokens))].set(one)


def front_door(in_parts: bool, dtype=None) -> Callable:
    """The product as models have it; what may be in parts is."""

    def product(x, weight):
        y = matmul(x, weight, allow_partial_sums=in_parts, dtype=dtype)
        return y.summands if isinstance(y, PartialSums) else y

    return product


def today(tokens: int, weight: Weight, in_parts: bool) -> tuple[Way, str]:
    """What models have, and the name of the row of the table and its tiling."""
    x = jax.ShapeDtypeStruct((tokens, weight.inputs), jnp.bfloat16)
    row = row_of(TABLE, Product(x, weight, dtype=jnp.bfloat16, allow_partial_sums=in_parts))
    how: Any = ""
    if row.name.startswith("few tokens"):
        how = tiling_of(x, weight, jnp.bfloat16, in_parts, one_order=True)
    elif row.name == "bf16":
        how = small_batch_tiling(tokens, *weight.shape, in_parts, 2)
    elif row.name in ("codes", "groups, eight bits", "int8"):
        bits = 4 if weight.packed else 8
        how = weight_only_tiling(tokens, *weight.shape, bits, row.name.startswith("groups"))
    text = str(how).replace("MosaicTiling", "").replace("MatmulTiling", "")
    return Way(front_door(in_parts), tuned=row.name in ("XLA", "one token, eight bits")), f"{row.name} {text}".strip()


def summed(y) -> np.ndarray:
    """Results in bfloat16. Parts are added up one after the other in float32, as the norm that follows adds them."""
    y = np.asarray(y)
    if y.ndim == 2:
        return y
    return functools.reduce(np.add, np.moveaxis(y.astype(np.float32), 1, 0)).astype(jnp.bfloat16)


def measure(run: Run, weights, ways: Mapping[Any, tuple[int, Way]]) -> dict[Any, Measured | Exception]:
    """Compile, compare and time ways to multiply a number of tokens."""
    inputs = weights[0].inputs

    def several(product, x, weights):
        return [product(x, weight) for weight in weights]

    def job(tokens: int, way: Way) -> Job:
        x = jax.ShapeDtypeStruct((tokens, inputs), jnp.bfloat16)
        # XLA would make one product of several that read the same x.
        options = {
            **decode_options(jax.tree.leaves(weights), tokens),
            "xla_gpu_dot_merger_threshold_mb": 0,
            **way.options,
        }
        return Job(functools.partial(several, way.product), (x, weights), options, way.tuned)

    programs = compile_all({label: job(*way) for label, way in ways.items()})
    found: dict[Any, Measured | Exception] = {}
    for label, (tokens, _) in ways.items():
        try:
            if isinstance(programs[label], Exception):
                raise programs[label]
            with run.watched():
                rows = []
                for number in range(2 if run.small else ROWS):
                    x = tokens_of(number, tokens, inputs)
                    rows.append(summed(picked(programs[label](x, weights)[0], places_of(tokens))))
                x = tokens_of(0, tokens, inputs)
                took = microseconds(functools.partial(programs[label], x, weights), len(weights), run.small)
            found[label] = Measured(np.stack(rows), took, programs[label])
        except Exception as error:
            found[label] = error
    return found


def say_failures(run: Run, key: str, found: Mapping[Any, Measured | Exception]) -> dict[Any, Measured]:
    """What could be measured; of the rest, a line each."""
    for label, one in found.items():
        if isinstance(one, Exception):
            text = " ".join(str(one).split())[:200]
            run.failed.append(f"{key}, {label}")
            run.say(f"{key}, {label}", f"failed: {type(one).__name__}: {text}")
    return {label: one for label, one in found.items() if isinstance(one, Measured)}


def one_product(run: Run, kind: str, name: str, shape: tuple[int, int], in_parts: bool, tokens: Sequence[int]):
    """Print the classes of a product, and each number of tokens with its time and its kernel."""
    weights = weights_for(kind, shape, run.small)
    counts = [count for count in tokens if name != "head" or count <= MOST_OF_HEAD]
    served = {count: today(count, weights[0], in_parts) for count in counts}
    key = f"{kind} {name}"
    found = say_failures(run, key, measure(run, weights, {count: (count, served[count][0]) for count in counts}))
    if not found:
        return
    run.kept["today", kind, name] = found
    moved = [count for count, one in found.items() if not one.anywhere]
    note = f"; DEPENDS ON PLACE OR NEIGHBOURS: {moved}" if moved else ""
    by = {}
    for count, one in found.items():
        by[count] = served[count][1]
        if served[count][0].tuned or served[count][1].startswith("one token"):
            by[count] += f" {kernels_of(one.program)}"
    times = {str(count): one.took for count, one in found.items()}
    run.say_classes(key, {count: one.first for count, one in found.items()}, note, us=times, by=by)
    run.result.measured.update({f"{key}, {count} tokens": one.took for count, one in found.items()})
    for count, one in found.items():
        print(f"    {count:>5} {one.took:>8.1f} us  {by[count]}", flush=True)


def products(run: Run, tokens: Sequence[int]):
    """The shapes of an 8B in all forms, and then those of others, of fewer numbers of tokens."""
    shapes, kinds = (SMALL, ("bf16", "int8")) if run.small else (LLAMA, KINDS)
    few = [count for count in tokens if count in (1, 5, 16, 64, 80, 320, 640)] or list(tokens)

    def lines(kinds, shapes, counts):
        for kind in kinds:
            for name, (shape, in_parts) in shapes.items():
                run.attempt(f"{kind} {name}", one_product, run, kind, name, shape, in_parts, counts)

    main = ("gate_up", "down")
    if run.small:
        return lines(kinds, shapes, tokens)
    lines(kinds[:1], shapes, tokens)
    lines(kinds[1:4], {name: shapes[name] for name in main}, tokens)
    lines(kinds[4:], {"gate_up": shapes["gate_up"]}, few)
    lines(kinds[1:4], {name: shapes[name] for name in shapes if name not in main}, few)
    lines(("bf16",), OTHERS, few)
    return lines(kinds[4:], {"down": shapes["down"]}, few)
