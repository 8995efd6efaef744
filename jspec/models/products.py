"""Which kernel multiplies each map of a model, and why no row of the table of products before it does."""

import re
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from jspec.models.layers import Linear
from jspec.models.mla import LatentAttention
from jspec.models.moe import Mixture
from jspec.pallas.dispatch import explain
from jspec.pallas.matmul.table import TABLE, Product


def kernels_of(model: Any, tokens: int) -> Iterator[str]:
    """A line for each map of a model, maps of the same name and shape once: the row that multiplies so many tokens, and of
    the rows before it for weights that are stored so, why they do not."""
    seen = set()
    for name, product in products(model, tokens):
        if (key := (name, product.weight.shape, product.weight.kind)) not in seen:
            seen.add(key)
            *refused, (row, _) = explain(TABLE, product).items()
            stored = {row.name for row in TABLE if product.weight.kind in row.weights}
            reasons = "".join(f', not by "{other}" ({why})' for other, why in refused if other in stored)
            yield f'{name} {list(product.weight.shape)} in {product.weight.kind} by "{row}"{reasons}'


def products(model: Any, tokens: int) -> Iterator[tuple[str, Product]]:
    """Each product by its name. Experts and maps of latents, which have kernels of their own, are left out."""
    parts = list(nnx.iter_graph(model))
    own = [linear for _, part in parts if isinstance(part, Mixture) for linear in (part.gate_up, part.down)]
    own += [linear for _, part in parts if isinstance(part, LatentAttention) for linear in (part.keys, part.values)]
    for path, part in parts:
        if isinstance(part, Linear) and not any(part is other for other in own):
            x = jax.ShapeDtypeStruct((tokens, part.in_features), model.dtype)
            bias = None if part.bias is None else part.bias[...]
            in_parts = part.allow_partial_sums and (bias is None or part.reduce_axis is not None)
            name = re.sub(r"\.\d+\.", ".*.", ".".join(map(str, path)))
            yield name, Product(x, part.stored, bias, model.dtype, in_parts)
    if model.head is None:
        weight = model.output_weight
        yield (
            "embedding",
            Product(jax.ShapeDtypeStruct((tokens, weight.inputs), model.dtype), weight, dtype=model.dtype),
        )
