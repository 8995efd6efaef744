"""Splits a model into a flat list of arrays, which a jitted function takes as its argument.

Calling a jitted function with an NNX module costs milliseconds on the host, with a list of arrays microseconds.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx


class Split(NamedTuple):
    """The arrays of a model, and a function that rebuilds the model from them: call ``merge(leaves)`` inside a trace."""

    leaves: list[jax.Array]
    merge: Callable[[Sequence[jax.Array]], Any]


def split(model) -> Split:
    """Split an NNX module, or any pytree that acts as a model. None and a model without arrays have no leaves."""
    if not isinstance(model, nnx.Module):
        leaves, tree = jax.tree.flatten(model)
        return Split(leaves, tree.unflatten)
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    return Split(leaves, lambda leaves: nnx.merge(graph, tree.unflatten(leaves)))
