"""The least time of a round: what has to be read at the rate of memory, and multiplied at the rate of the tensor
cores."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from jspec.models.eagle import EagleHead
from jspec.models.eagle3 import Eagle3Head

FLOPS = 790e12  # of bfloat16 products on one H200, four fifths of its peak
ITEMSIZE = 2  # of a number in the cache


class Weights(NamedTuple):
    """Of the arrays that one pass reads: their bytes, and how many of their numbers are multiplied."""

    bytes: float
    numbers: float

    def __add__(self, other: Any) -> "Weights":
        return Weights(self.bytes + other.bytes, self.numbers + other.numbers)


@dataclasses.dataclass(frozen=True)
class Pass:
    """A trip through a model.

    Attributes:
      weights: what it reads of the model, once.
      rows: tokens that it reads, in all rows of the batch together.
      kv_bytes: live keys and values, read once; attention does not overlap the products.
      times: trips of this kind in a round.
    """

    weights: Weights
    rows: int
    kv_bytes: float
    times: int = 1

    def seconds(self, bandwidth: float) -> float:
        products = max(self.weights.bytes / bandwidth, 2 * self.weights.numbers * self.rows / FLOPS)
        return self.times * (products + self.kv_bytes / bandwidth)


def floor(passes: Sequence[Pass], bandwidth: float) -> float:
    """Seconds of a round, at ``bandwidth`` bytes per second."""
    return sum(one.seconds(bandwidth) for one in passes)


def weights_of(model, without: Sequence[str] = ()) -> Weights:
    """All arrays of an NNX module but those whose path has a name in ``without``."""
    total = Weights(0, 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model)):
        names = {str(getattr(key, "key", getattr(key, "name", key))) for key in path}
        if names.isdisjoint(without):
            size = float(leaf.size)
            total += Weights(size * leaf.dtype.itemsize, size if leaf.ndim >= 2 else 0.0)
    return total


def language_model(model) -> Weights:
    """Of a decoder: everything, the embedding only where it is the output head too."""
    return weights_of(model, () if model.head is None else ("embedding",))


def output_head(model) -> Weights:
    """Of a decoder's output head alone."""
    if model.head is not None:
        return weights_of(model.head)
    every, rest = weights_of(model), weights_of(model, ("embedding",))
    return Weights(every.bytes - rest.bytes, every.numbers - rest.numbers)


def kv_bytes(model, slots: float) -> float:
    """Keys and values of so many slots."""
    L, G, H = model.cache_shape()
    return 2 * L * G * H * slots * ITEMSIZE


def target_pass(target, batch: int, width: int, length: float) -> Pass:
    """``width`` rows for each of ``batch`` requests, over ``length`` live slots each."""
    return Pass(language_model(target), batch * width, kv_bytes(target, batch * length))


def draft_passes(target, module, K: int, batch: int, length: float) -> list[Pass]:
    """The passes of a drafter: one that reads what it needs of the target or the text, and those that follow."""
    kv = kv_bytes(module, batch * length)
    if not isinstance(module, EagleHead | Eagle3Head):
        return [Pass(language_model(module), batch, kv, times=K)]
    borrowed = output_head(target) if getattr(module, "head", None) is None else Weights(0, 0)
    first = weights_of(module, ("embedding",)) + borrowed
    if module.config.method == "parallel":
        return [Pass(first, batch * K, kv)]
    # Only the first pass of an EAGLE-3 head reads streams of the target, which it joins.
    later = weights_of(module, ("embedding", "fuse_in")) + borrowed if isinstance(module, Eagle3Head) else first
    return [Pass(first, batch, kv), Pass(later, batch, kv, times=K - 1)]
