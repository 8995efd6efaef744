"""Which kernel multiplies each map of a model, why no row of the table of products before it does, and which is the first
whose bits depend on how many tokens share its pass."""

import functools
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jspec.models.layers import Linear
from jspec.models.mla import LatentAttention
from jspec.models.moe import Mixture
from jspec.pallas.dispatch import explain, one_order, row_of
from jspec.pallas.matmul.partial_sums import reduce_partial_sums
from jspec.pallas.matmul.table import TABLE, Product, Row, matmul

_COMPUTED = "attention", "attention.out", "mlp", "gate_up", "down"  # parts of names of a layer's maps, in that order


def kernels_of(model: Any, tokens: int) -> Iterator[str]:
    """A line for each map of a model, maps of the same name and shape once: the row that multiplies so many tokens, and of
    the rows before it for weights that are stored so, why they do not."""
    seen = set()
    for path, product in _products(model, tokens):
        name = re.sub(r"\.\d+\.", ".*.", path)
        if (key := (name, product.weight.shape, product.weight.kind)) not in seen:
            seen.add(key)
            *refused, (row, _) = explain(TABLE, product).items()
            stored = {row.name for row in TABLE if product.weight.kind in row.weights}
            reasons = "".join(f', not by "{other}" ({why})' for other, why in refused if other in stored)
            yield f'{name} {list(product.weight.shape)} in {product.weight.kind} by "{row}"{reasons}'


def kernels_by_size(model: Any, dtype, sizes: Sequence[int]) -> Iterator[tuple[str, list[Row]]]:
    """The rows of the table that multiply each map of a model of a dtype, for passes of each number of tokens."""
    found: dict[tuple, list[Row]] = {}  # maps of one kind, such as those of most layers, have the same
    for name, product in _products(model, 1, dtype):
        product, weight = product._replace(one_order=True), product.weight
        of = [jax.ShapeDtypeStruct((size, product.x.shape[-1]), product.x.dtype) for size in sizes]
        kind = weight.shape, weight.kind, weight.form, product.x.shape, product.bias is None, product.allow_partial_sums
        if kind not in found:
            found[kind] = [row_of(TABLE, product._replace(x=x), product.one_order) for x in of]
        yield name, found[kind]


def first_difference(model: Any, sizes: Sequence[int], ordered: bool = False) -> str:
    """The first product, in the order in which a layer computes them, that gives a token other bits among other numbers of
    tokens (``sizes``), and the kernels that compute it; or that no product does, so that attention or what is between
    products does. Layers follow each other, and what is no map of a layer comes last. ``ordered`` says whether kernels are
    those of ``jspec.pallas.dispatch.one_order``."""

    @functools.partial(jax.jit, static_argnames=("dtype", "in_parts"))
    @one_order(ordered)
    def first_row(x, weight, bias, dtype, in_parts):
        y = matmul(x, weight, bias, dtype=dtype, allow_partial_sums=in_parts)
        return reduce_partial_sums(y, jnp.float32)[0].astype(jnp.float32)

    def result_of(product: Product, size: int) -> np.ndarray:
        x = _tokens(size, product.x)
        return np.asarray(first_row(x, product.weight, product.bias, product.dtype, product.allow_partial_sums))

    for name, product in sorted(_products(model, 1), key=_place):
        product = product._replace(one_order=ordered)
        results = {size: result_of(product, size) for size in sizes}
        groups: list[list[int]] = []
        for size in sizes:
            group = next((group for group in groups if np.array_equal(results[group[0]], results[size])), None)
            if group is None:
                groups.append([size])
            else:
                group.append(size)
        if len(groups) > 1:
            said = " and ".join(f"{_listed(group)} by {_kernels(product, group)}" for group in groups)
            return f"{name} {list(product.weight.shape)} in {product.weight.kind}: its bits are others with {said}"
    return "no product: attention, or what is between products"


def _place(named: tuple[str, Product]) -> tuple[int, int]:
    """Where a product stands in the order in which a model computes them."""
    layer = re.match(r"layers\.(\d+)\.", named[0])
    parts = [i for i, part in enumerate(_COMPUTED) if part in named[0]]
    return int(layer[1]) if layer else sys.maxsize, max(parts, default=0)


def _tokens(size: int, like: Any) -> jax.Array:
    """So many random tokens, the first of which is always the same one: ``[size, in]`` of the dtype of ``like``."""
    inputs = like.shape[-1]
    x = jax.random.normal(jax.random.key(size), (size, inputs), like.dtype)
    return x.at[0].set(jax.random.normal(jax.random.key(0), (inputs,), like.dtype))


def _kernels(product: Product, sizes: Sequence[int]) -> str:
    """The rows of the table that compute a product of so many tokens."""
    names = []
    for size in sizes:
        x = jax.ShapeDtypeStruct((size, product.x.shape[-1]), product.x.dtype)
        names.append(f'"{row_of(TABLE, product._replace(x=x), product.one_order).name}"')
    return " and ".join(dict.fromkeys(names))


def _listed(sizes: Sequence[int]) -> str:
    return f"{', '.join(map(str, sizes))} token{'s' if list(sizes) != [1] else ''}"


def _products(model: Any, tokens: int, dtype=None) -> Iterator[tuple[str, Product]]:
    """Each product by its name. Experts and maps of latents, which have kernels of their own, are left out."""
    dtype = model.dtype if dtype is None else jnp.dtype(dtype)
    parts = list(nnx.iter_graph(model))
    own = [linear for _, part in parts if isinstance(part, Mixture) for linear in (part.gate_up, part.down)]
    own += [linear for _, part in parts if isinstance(part, LatentAttention) for linear in (part.keys, part.values)]
    for path, part in parts:
        if isinstance(part, Linear) and not any(part is other for other in own):
            x = jax.ShapeDtypeStruct((tokens, part.in_features), dtype)
            bias = None if part.bias is None else part.bias[...]
            in_parts = part.allow_partial_sums and (bias is None or part.reduce_axis is not None)
            yield ".".join(map(str, path)), Product(x, part.stored, bias, dtype, in_parts)
    weight = getattr(model, "output_weight", None)  # a draft head may borrow the target's
    if getattr(model, "head", model) is None and weight is not None:
        yield (
            "embedding",
            Product(jax.ShapeDtypeStruct((tokens, weight.inputs), dtype), weight, dtype=dtype),
        )
