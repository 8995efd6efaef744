"""Reads and writes the rotary embedding settings of a Hugging Face config as a ``Rope``.

Older configs have ``rope_theta`` at the top level and an object ``rope_scaling``, whose kind is under ``type`` or
``rope_type``. Newer ones have one object ``rope_parameters`` with everything. Both are read. Defaults are those of
transformers' ``modeling_rope_utils``.
"""

import math
from typing import Any

from jspec.checkpoints.fields import Fields
from jspec.config import ROPE_KINDS, Rope

DEFAULT_THETA = 10_000.0


def read_rope(config: Fields, max_position: int) -> Rope:
    """The ``Rope`` that a config.json describes.

    Args:
      config: the top-level fields of config.json.
      max_position: ``max_position_embeddings``, the default of some settings.

    Raises:
      Refusal: an unknown kind, or a setting that is missing or out of range.
    """
    # transformers lets rope_scaling win over rope_parameters, and a theta inside the object over the one outside.
    scaling = config.nested("rope_scaling") or config.nested("rope_parameters") or Fields({}, config.where, "rope.")
    theta = scaling.number("rope_theta", config.number("rope_theta", DEFAULT_THETA))
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    for fields in (scaling, config):
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            raise fields.refuse("partial_rotary_factor", "1, because partial rotary embeddings are not supported")
    for layer_kind in ("full_attention", "sliding_attention"):
        if layer_kind in scaling.raw:
            raise scaling.refuse(layer_kind, "one rope for all layers")
    if kind not in ROPE_KINDS:
        raise scaling.refuse("rope_type" if "rope_type" in scaling.raw else "type", f"one of {', '.join(ROPE_KINDS)}")
    read = {"linear": _factor, "dynamic": _factor, "llama3": _llama3, "yarn": _yarn}.get(kind)
    return Rope(theta=float(theta), kind=kind, **(read(scaling, config, max_position) if read else {}))


def write_rope(rope: Rope) -> dict[str, Any]:
    """The keys of config.json for ``rope``: ``rope_theta`` and ``rope_scaling``, which old and new readers understand."""
    long = {"rope_type": rope.kind, "type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        long["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        long |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        keys = ("attention_factor", "beta_fast", "beta_slow", "truncate")
        long |= {key: getattr(rope, key) for key in keys}
    return {"rope_theta": rope.theta, "rope_scaling": None if rope.kind == "default" else long}


def _factor(scaling: Fields, config: Fields, max_position: int) -> dict:
    return {"factor": float(scaling.number("factor"))}


def _llama3(scaling: Fields, config: Fields, max_position: int) -> dict:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if high <= low:
        raise scaling.refuse("high_freq_factor", f"a number above low_freq_factor, {low}")
    return {
        "factor": float(scaling.number("factor")),
        "low_freq_factor": float(low),
        "high_freq_factor": float(high),
        "original_max_position": _original(scaling, config, max_position),
    }


def _yarn(scaling: Fields, config: Fields, max_position: int) -> dict:
    original = _original(scaling, config, max_position)
    factor = scaling.number("factor", max_position / original)
    theta = scaling.number("rope_theta", config.number("rope_theta", DEFAULT_THETA))
    if theta <= 1:
        raise scaling.refuse("rope_theta", "a number above 1, because yarn takes its logarithm")
    numerator, denominator = scaling.number("mscale", None), scaling.number("mscale_all_dim", None)
    if numerator is not None and denominator is not None:
        default = _mscale(factor, numerator) / _mscale(factor, denominator)
    else:
        default = _mscale(factor, 1.0)
    return {
        "factor": float(factor),
        "original_max_position": original,
        "attention_factor": float(scaling.number("attention_factor", default)),
        "beta_fast": float(scaling.number("beta_fast", 32.0)),
        "beta_slow": float(scaling.number("beta_slow", 1.0)),
        "truncate": scaling.flag("truncate", True),
    }


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _original(scaling: Fields, config: Fields, max_position: int) -> int:
    """The context length before scaling. A top-level key takes precedence, as in transformers."""
    inside = scaling.integer("original_max_position_embeddings", max_position)
    return config.integer("original_max_position_embeddings", inside)
