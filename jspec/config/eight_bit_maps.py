"""Which linear maps of a model in ``int4`` have eight bits: those where four cost most, as long as the mean stays small.

Four bits move a model mostly by its output head, by its values, by its last layer and by the down projections of its
outermost layers (``benchmarks/log/quantised-quality.md``). Where all queries, keys and values can have eight, they do,
because values alone are one more product for each layer."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from jspec.config.decoder_params import parts_values
from jspec.config.model_fields import HEAD, ModelFields
from jspec.quantization.formats import KINDS, Format

# Of a weight, in the mean over all linear maps but the output head: those of its code and its part of a scale. What fills
# the last block of 128 inputs is not counted.
MOST_BITS = 4.6
FOUR, EIGHT = KINDS["int4"], KINDS["int8"]
QKV = ".attention.qkv"
Shapes = Mapping[str, tuple[int, ...]]  # name of a linear map -> (out, in)


def eight_bit_maps(config: ModelFields) -> tuple[tuple[str, str], ...]:
    """``other_formats`` of a model in ``int4``: of the output head, with an embedding that is tied to it, and of other maps.

    These are the queries, keys and values of all layers, or where they take too many bits the values alone; the last layer;
    and down projections from the first and the last layer inwards: each of these while the mean of all maps is at most
    ``MOST_BITS``. Experts stay in four bits. Values are no map of their own where queries and keys have eight bits, too.

    Args:
      config: that of the model with all its maps in ``int4``.
    """
    every = _shapes(config)
    most = MOST_BITS * sum(outputs * inputs for outputs, inputs in every.values()) - _bits(FOUR, every)
    chosen: Shapes = {}
    for alternatives in _in_order(config, every):
        for maps in alternatives:
            joined = {f"{name.removesuffix('qkv')}values" for name in maps if name.endswith(QKV)}
            more = {name: shape for name, shape in {**chosen, **maps}.items() if name not in joined}
            if _bits(EIGHT, more) - _bits(FOUR, more) <= most:
                chosen = more
                break
    return tuple(dict.fromkeys((HEAD, *chosen), EIGHT.name).items())


def _in_order(config: ModelFields, every: Shapes) -> Iterator[tuple[Shapes, ...]]:
    """What gets eight bits, what costs most in four first: alternatives, of which the first that fits is taken."""
    last, layers = config.num_layers - 1, range(config.num_layers)
    values = tuple((f"layers.{layer}.attention.values", EIGHT.name) for layer in layers if parts_values(config, layer))
    apart = _shapes(dataclasses.replace(config, other_formats=values))
    joined = {name: shape for name, shape in every.items() if name.endswith(QKV)}
    yield joined, {name: apart[name] for name, _ in values}
    dense = [layer for layer in layers if not config.has_experts(layer)]
    if last in dense:
        yield ({name: shape for name, shape in every.items() if name.startswith(f"layers.{last}.")},)
    for layer in sorted(dense, key=lambda layer: min(layer, last - layer)):
        name = f"layers.{layer}.mlp.down"
        yield ({name: every[name]},)


def _shapes(config: ModelFields) -> Shapes:
    """The shapes of all quantised maps but the output head and an embedding that is tied to it."""
    stored = {name.removesuffix(".weight"): param.shape for name, param in config.stored_params().items()}
    return {name: shape for name, shape in stored.items() if name not in (HEAD, "embedding")}


def _bits(form: Format, maps: Shapes) -> int:
    return sum(form.bits * math.prod(shape) + 8 * form.arrays(shape)["scale"].bytes for shape in maps.values())
