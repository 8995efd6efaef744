"""The floor of a round: the least time in which its bytes can be read at the rate of the memory and its products made at
the rate of the tensor cores."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from jspec.models.cache_pools import StateShape
from jspec.models.heads.block import BlockHead
from jspec.models.heads.eagle import EagleHead
from jspec.models.heads.eagle3 import Eagle3Head
from jspec.models.heads.mtp import MTPHead

FLOPS = 790e12  # of bfloat16 products on one H200, four fifths of its peak
ITEMSIZE = 2  # of a number in a cache that is not rounded


class Weights(NamedTuple):
    """How large the arrays are that one pass reads: their bytes, and how many of their numbers are multiplied."""

    bytes: float
    numbers: float

    def __add__(self, other: Any) -> "Weights":
        return Weights(self.bytes + other.bytes, self.numbers + other.numbers)


@dataclasses.dataclass(frozen=True)
class Pass:
    """One pass through a model, as its floor sees it.

    Attributes:
      weights: the arrays of the model that it reads, each once.
      tokens: query tokens that it reads, in all rows of the batch together.
      kv_bytes: live keys and values, read once, and recurrent states, read and written once; neither overlaps the products.
      times: passes of this kind in a round.
    """

    weights: Weights
    tokens: float
    kv_bytes: float
    times: int = 1

    def seconds(self, bandwidth: float) -> float:
        products = max(self.weights.bytes / bandwidth, 2 * self.weights.numbers * self.tokens / FLOPS)
        return self.times * (products + self.kv_bytes / bandwidth)


def floor(passes: Sequence[Pass], bandwidth: float) -> float:
    """Seconds of a round, at ``bandwidth`` bytes per second."""
    return sum(single.seconds(bandwidth) for single in passes)


def weights_of(model, without: Sequence[str] = ()) -> Weights:
    """The size of all arrays of an NNX module, except those whose path has a name in ``without``."""
    total = Weights(0, 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model)):
        names = {str(getattr(key, "key", getattr(key, "name", key))) for key in path}
        if names.isdisjoint(without):
            size = float(leaf.size)
            total += Weights(size * leaf.dtype.itemsize, size if leaf.ndim >= 2 else 0.0)
    return total


def language_model(model, hit: float | None = None) -> Weights:
    """The size of what a pass of a decoder reads: all of it, but the embedding only if it is the output head too.

    Args:
      model: the decoder.
      hit: of how many experts a layer reads the weights, on average; None for a model without experts.
    """
    found, experts = weights_of(model, () if model.head is None else ("embedding",)), model.config.experts
    if experts is None:
        return found
    assert hit is not None, "the floor of a mixture counts the experts that were hit"
    layers = [layer for i, layer in enumerate(model.layers) if model.config.has_experts(i)]
    mixtures = [layer.mlp if layer.beside is None else layer.beside.mixture for layer in layers]
    return _of_hit(found, mixtures, model.config, hit)


def _of_hit(weights: Weights, mixtures: Sequence, config, hit: float) -> Weights:
    """``found`` with the weights of only those experts of its ``mixtures`` that are hit, of each as many as ``hit``."""
    stacked, experts = [part for mixture in mixtures for part in (mixture.gate_up, mixture.down)], config.experts
    bytes_, numbers = (sum(sizes) for sizes in zip(*map(weights_of, stacked), strict=True))
    every, each = experts.all, experts.chosen + experts.shared
    multiplied = len(mixtures) * each * 3 * experts.width * config.hidden_size  # of each token
    return Weights(weights.bytes - bytes_ * (1 - hit / every), weights.numbers - numbers + multiplied)


def expected_hit(experts, tokens: int) -> float:
    """Of how many experts a pass over so many tokens reads the weights, if routers spread tokens evenly."""
    return experts.count * (1 - (1 - experts.chosen / experts.count) ** tokens) + experts.shared


def output_head(model) -> Weights:
    """The size of a decoder's output head."""
    if model.head is not None:
        return weights_of(model.head)
    every, rest = weights_of(model), weights_of(model, ("embedding",))
    return Weights(every.bytes - rest.bytes, every.numbers - rest.numbers)


def kv_bytes(model, slots: float) -> float:
    """Bytes of the keys and values, or latents, in so many cache slots. A layer that reads another's reads them again."""
    return slots * sum(_token_bytes(model))


def _token_bytes(model) -> list[int]:
    """How many bytes of each token in the cache each layer reads; 0 for one with a recurrent state."""
    shapes, decoder = model.cache_shape(), model.config.decoder
    sources = [decoder.layer(i).reads_cache_of for i in range(len(shapes))]
    read = [shapes[i if source is None else source] for i, source in enumerate(sources)]

    def of_layer(shape) -> int:
        if isinstance(shape, StateShape):
            return 0
        heads = (1 if shape.latents else 2) * shape.heads
        if shape.rounding is None:
            return ITEMSIZE * heads * shape.size
        scale = 4 if shape.rounding.k is None else 0  # of each token and head
        return heads * (shape.size + scale)

    return [of_layer(shape) for shape in read]


def state_bytes(model, batch: int) -> int:
    """Bytes of the recurrent states of so many rows, which a pass reads and writes once."""
    nets = model.config.decoder.delta_nets
    if nets is None:
        return 0
    return 2 * 4 * batch * sum(nets.layers) * nets.value_heads * nets.key_size * nets.value_size


def target_pass(target, batch: int, width: float, length: float, hit: float | None = None) -> Pass:
    """A pass of the target over ``width`` query tokens, on average, in each of ``batch`` rows, with ``length`` live slots.

    Layers with a window read no more slots than that. ``hit`` is that of ``language_model``."""
    slots = (length if window is None else min(length, window) for window in target.config.windows)
    read = batch * sum(slots * each for slots, each in zip(slots, _token_bytes(target), strict=True))
    return Pass(language_model(target, hit), batch * width, read + state_bytes(target, batch))


def draft_passes(target, module, K: int, batch: int, length: float) -> list[Pass]:
    """The passes of a drafter: one that reads what it needs of the target or the text, and those that follow."""
    kv = kv_bytes(module, batch * length)
    if isinstance(module, MTPHead):
        c, found = module.config.layers, weights_of(module)
        found += output_head(target) if module.head is None else Weights(0, 0)
        mixtures = [] if c.experts is None else [layer.mlp for layer in module.layers]
        reads = [
            _of_hit(found, mixtures, c, expected_hit(c.experts, tokens)) if mixtures else found
            for tokens in (batch * (K + 1), batch)
        ]
        return [Pass(reads[0], batch * (K + 1), kv), Pass(reads[1], batch, kv, times=K - 1)]
    if isinstance(module, BlockHead):
        borrowed = output_head(target) if module.head is None else Weights(0, 0)
        once = weights_of(module, ("embedding", "markov", "confidence")) + borrowed
        passes = [Pass(once, batch * module.config.block_size, kv)]
        markov = [] if module.markov is None else [Pass(weights_of(module.markov, ("embedding",)), batch, 0, times=K)]
        return passes + markov
    if not isinstance(module, EagleHead | Eagle3Head):
        return [Pass(language_model(module), batch, kv, times=K)]
    borrowed = output_head(target) if getattr(module, "head", None) is None else Weights(0, 0)
    first = weights_of(module, ("embedding",)) + borrowed
    if module.config.method == "parallel":
        return [Pass(first, batch * K, kv)]
    # Only the first pass of an EAGLE-3 head reads auxiliary hidden states of the target, which it joins.
    later = weights_of(module, ("embedding", "fuse_in")) + borrowed if isinstance(module, Eagle3Head) else first
    return [Pass(first, batch, kv), Pass(later, batch, kv, times=K - 1)]
