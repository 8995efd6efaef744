"""Flattens a model into a list of arrays, which a jitted function takes as its argument.

Calling a jitted function with an NNX module costs milliseconds on the host, with a list of arrays microseconds."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx


def copied(module: nnx.Module) -> Any:
    """A copy of a module with the same arrays, which may be changed before anything else has it."""
    return nnx.merge(*nnx.split(module))


def without_arrays(model: Any) -> Any:
    """A copy of a module, or of a pytree that acts as one, with shapes in place of its arrays."""

    def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    if not isinstance(model, nnx.Module):
        return jax.tree.map(shape_of, model)
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(shape_of, state))


class FlatModule(NamedTuple):
    """The flat parameters of a model, and a function that rebuilds the model from them: call ``merge(leaves)`` inside a
    trace."""

    leaves: list[jax.Array]
    merge: Callable[[Sequence[jax.Array]], Any]


def flatten(model) -> FlatModule:
    """Flatten an NNX module, or any pytree that acts as a model. None and a model without arrays have no leaves."""
    if not isinstance(model, nnx.Module):
        leaves, tree = jax.tree.flatten(model)
        return FlatModule(leaves, tree.unflatten)
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    return FlatModule(leaves, lambda leaves: nnx.merge(graph, tree.unflatten(leaves)))
