"""Reads and writes the rotary embedding settings of a Hugging Face config as a ``Rope``.

Older configs have ``rope_theta`` at the top level and an object ``rope_scaling``, whose kind is under ``type`` or
``rope_type``. Newer ones have one object ``rope_parameters`` with everything. Both are read. Defaults are those of
transformers' ``modeling_rope_utils``.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jspec._validation import require
from jspec.checkpoints.files.fields import Fields
from jspec.config import ROPE_KINDS, Rope

DEFAULT_THETA = 10_000.0
KEYS = ("rope_scaling", "rope_parameters")  # of the object, by older and by newer configs
_SECTIONS = ("mrope_section", "mrope_interleaved")

Ropes = dict[str, Any]  # fields of ``ModelConfig``
Windows = tuple[int | None, ...]  # the attention window of each layer


def no_ropes(config: Fields, windows: Windows) -> Ropes:
    """The field ``rope`` of a ``ModelConfig`` whose layers do not rotate."""
    del config, windows
    return {"rope": None}


def read_ropes(config: Fields, windows: Windows) -> Ropes:
    """The field ``rope`` of a ``ModelConfig`` whose layers all have the same."""
    del windows
    return {"rope": read_rope(config)}


def read_ropes_of_some_layers(config: Fields, windows: Windows) -> Ropes:
    """The fields ``rope`` and ``layer_ropes`` where some layers do not rotate (SmolLM3)."""
    rope, rotated = read_rope(config), rotated_layers(config, len(windows))
    return {"rope": rope, "layer_ropes": () if all(rotated) else tuple(rope if flag else None for flag in rotated)}


def read_partial_rope(config: Fields, windows: Windows) -> Ropes:
    """The field ``rope`` of a ``ModelConfig`` whose layers all have the same, which may rotate a part of each head."""
    del windows
    return {"rope": read_rope(config, partial=True)}


def read_rope_by_dimension(config: Fields, windows: Windows) -> Ropes:
    """The field ``rope`` of MiniMax-M2, where ``rotary_dim`` may say how many numbers of each head rotate."""
    rotated = config.integer("rotary_dim", None)
    if rotated is not None:
        head_dim = config.integer("head_dim")
        if rotated > head_dim:
            raise config.refuse("rotary_dim", f"at most head_dim, {head_dim}")
        fraction = config.raw.get("partial_rotary_factor", rotated / head_dim)
        config = dataclasses.replace(config, raw={**config.raw, "partial_rotary_factor": fraction})
    return read_partial_rope(config, windows)


def read_ropes_of_windows(config: Fields, windows: Windows) -> Ropes:
    """The fields ``rope`` and ``layer_ropes`` where only layers with a window rotate (EXAONE 4): all of them if config.json
    has no ``sliding_window``."""
    rope = read_rope(config)
    everywhere = config.raw.get("sliding_window") is None
    return {"rope": rope, "layer_ropes": () if everywhere else tuple(rope if window else None for window in windows)}


def read_growing_rope(config: Fields, windows: Windows) -> Ropes:
    """The field ``rope`` of Ministral 3, whose object may also say how queries grow with their position."""
    del windows
    rope, scaling = read_rope(config), config.nested("rope_scaling") or config.nested("rope_parameters")
    growth = 0.0 if scaling is None else scaling.number("llama_4_scaling_beta", 0.0)
    if scaling is not None and scaling.raw.get("max_position_embeddings") is not None:  # repeats the key outside
        scaling.integer("max_position_embeddings")
    if growth == 0.0:
        return {"rope": rope}
    assert scaling is not None
    original = scaling.integer("original_max_position_embeddings")
    return {"rope": dataclasses.replace(rope, query_growth=float(growth), original_max_position=original)}


def read_rope_with_alpha(config: Fields, windows: Windows) -> Ropes:
    """The field ``rope`` of Hunyuan: ``dynamic`` with a number ``alpha`` stands for a larger theta, for texts of any
    length."""
    del windows
    rope, scaling = read_rope(config), config.nested("rope_scaling") or config.nested("rope_parameters")
    if rope.kind != "dynamic" or scaling is None or scaling.raw.get("alpha") in (None, 0):
        return {"rope": rope}
    heads = config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", config.integer("hidden_size") // heads or None, low=4)
    theta = rope.theta * scaling.number("alpha") ** (head_dim / (head_dim - 2))
    return {"rope": Rope(theta=float(theta))}


# Kind of attention -> the key of its theta in older configs, and the theta of the class.
_GEMMA3_THETAS: Mapping[str, tuple[str, float]] = {
    "full_attention": ("rope_theta", 1_000_000.0),
    "sliding_attention": ("rope_local_base_freq", 10_000.0),
}
OLMO3_THETAS: Mapping[str, tuple[str, float]] = {
    "full_attention": ("rope_theta", 500_000.0),
    "sliding_attention": ("rope_theta", 500_000.0),
}


def read_ropes_by_attention(
    config: Fields, windows: Windows, thetas: Mapping[str, tuple[str, float]] = _GEMMA3_THETAS
) -> Ropes:
    """The fields ``rope`` and ``layer_ropes`` where layers with a window have a rope of their own (Gemma 3, OLMo 3).

    Newer configs have an object ``rope_parameters`` with one rope for each kind of attention. Older ones have those of
    full attention where other families have theirs, and a theta alone for windows."""
    parameters = config.nested("rope_parameters")
    by_kind = parameters is not None and any(isinstance(value, dict) for value in parameters.raw.values())
    ropes = {}
    for kind, (key, theta) in thetas.items():
        raw = {
            "rope_theta": config.number(key, theta),
            "max_position_embeddings": config.raw["max_position_embeddings"],
        }
        if parameters is not None and by_kind:
            nested = parameters.nested(kind)
            raw["rope_parameters"] = {} if nested is None else nested.raw
        elif kind == "full_attention":
            raw |= {name: config.raw.get(name) for name in ("rope_scaling", "rope_parameters")}
        ropes[kind] = read_rope(dataclasses.replace(config, raw=raw))
    full, local = ropes["full_attention"], ropes["sliding_attention"]
    return {"rope": full, "layer_ropes": tuple(full if window is None else local for window in windows)}


def as_of_text(rope: Fields) -> dict[str, Any]:
    """An object that describes a rotary embedding of texts and images, as it is for text alone.

    Images and videos have three positions a token (``mrope``): time, height and width, each of which rotates some of the
    pairs of a head. The three positions of a token of text are equal, so which pairs these are is of no account."""
    for name in _SECTIONS:
        rope.raw.get(name)  # known, so nobody is warned of it
    plain = {name: value for name, value in rope.raw.items() if name not in _SECTIONS}
    return plain | {name: "default" for name in ("type", "rope_type") if plain.get(name) == "mrope"}


def rotated_layers(config: Fields, layers: int) -> tuple[bool, ...]:
    """Whether each layer rotates: as ``no_rope_layers`` lists it, in which 1 stands for a layer that does, or else all
    but every ``no_rope_layer_interval``-th."""
    listed = config.raw.get("no_rope_layers")
    if listed is None:
        interval = config.integer("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if not isinstance(listed, list) or len(listed) < layers or any(entry not in (0, 1) for entry in listed):
        raise config.refuse(
            "no_rope_layers", f"a list of {layers} numbers, 1 for a layer that rotates and 0 for another"
        )
    return tuple(bool(entry) for entry in listed[:layers])


def read_phi3_rope(config: Fields, windows: Windows) -> Ropes:
    """The field ``rope`` of Phi-3 and Phi-4, which may rotate a part of each head, and call ``longrope`` by older names."""
    del windows
    key = "rope_scaling" if config.raw.get("rope_scaling") else "rope_parameters"
    scaling = config.nested(key)
    if scaling is not None:
        kind = scaling.text("rope_type", scaling.text("type", "default"))
        if kind not in ("default", "longrope", "su", "yarn"):
            raise scaling.refuse("rope_type" if "rope_type" in scaling.raw else "type", "'default' or 'longrope'")
        renamed = {**scaling.raw, "rope_type": "default" if kind == "default" else "longrope"}
        config = dataclasses.replace(config, raw={**config.raw, key: renamed})
    return {"rope": read_rope(config, partial=True)}


def read_rope(config: Fields, partial: bool = False) -> Rope:
    """The ``Rope`` that a config.json describes.

    Args:
      config: the top-level fields of config.json. Its ``max_position_embeddings`` is the default of some settings.
      partial: whether the architecture may rotate a part of each head only.

    Raises:
      Refusal: an unknown kind, or a setting that is missing or out of range.
    """
    # transformers lets rope_scaling win over rope_parameters, and a theta inside the object over the one outside.
    scaling = config.nested("rope_scaling") or config.nested("rope_parameters") or Fields({}, config.where, "rope.")
    theta = scaling.number("rope_theta", config.number("rope_theta", DEFAULT_THETA))
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    for fields in () if partial else (scaling, config):
        fields.only("partial_rotary_factor", 1.0, "because this architecture rotates whole heads")
    for layer_kind in ("full_attention", "sliding_attention"):
        if layer_kind in scaling.raw:
            raise scaling.refuse(layer_kind, "one rope for all layers")
    if kind not in ROPE_KINDS:
        raise scaling.refuse("rope_type" if "rope_type" in scaling.raw else "type", f"one of {', '.join(ROPE_KINDS)}")
    readers = {"linear": _factor, "dynamic": _factor, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
    read = {**readers, "proportional": _proportional}.get(kind)
    fraction = scaling.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    settings = read(scaling, config, config.integer("max_position_embeddings")) if read else {}
    return Rope(theta=float(theta), kind=kind, fraction=float(fraction), **settings)


def write_rope(rope: Rope | None) -> dict[str, Any]:
    """The keys of config.json for ``rope``: ``rope_theta`` and ``rope_scaling``, which old and new readers understand.

    Raises:
      ValueError: there is no rope, or it rotates a part of each head or scales queries, which draft heads cannot state.
    """
    plain = rope is not None and rope.fraction == 1 and rope.query_growth == 0
    expected = "a rotary embedding of whole heads, without query_growth, as layouts of draft heads have"
    require(plain, "rope", rope, expected)
    assert rope is not None
    long = {"rope_type": rope.kind, "type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn", "longrope"):
        long["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        long |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        keys = ("attention_factor", "beta_fast", "beta_slow", "truncate")
        long |= {key: getattr(rope, key) for key in keys}
    if rope.kind == "longrope":
        lists = {"short_factor": list(rope.short_factors), "long_factor": list(rope.long_factors)}
        long |= {"attention_factor": rope.attention_factor, **lists}
    return {"rope_theta": rope.theta, "rope_scaling": None if rope.kind == "default" else long}


def _factor(scaling: Fields, config: Fields, max_position: int) -> dict:
    return {"factor": float(scaling.number("factor"))}


def _proportional(scaling: Fields, config: Fields, max_position: int) -> dict:
    return {"factor": float(scaling.number("factor", 1.0))}


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


def yarn_score_factor(config: Fields) -> float:
    """What yarn multiplies attention scores by in models with latents (DeepSeek), besides what it does to the rotation."""
    scaling = config.nested("rope_scaling") or config.nested("rope_parameters")
    if scaling is None or scaling.text("rope_type", scaling.text("type", "default")) == "default":
        return 1.0
    denominator = scaling.number("mscale_all_dim", None)
    return _mscale(scaling.number("factor"), denominator) ** 2 if denominator is not None else 1.0


def _longrope(scaling: Fields, config: Fields, max_position: int) -> dict:
    original = _original(scaling, config, max_position)
    factor = scaling.number("factor", max_position / original)
    stretched = factor > 1 and original > 1
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if stretched else 1.0
    return {
        "factor": float(factor),
        "original_max_position": original,
        "attention_factor": float(scaling.number("attention_factor", default)),
        "short_factors": scaling.numbers("short_factor"),
        "long_factors": scaling.numbers("long_factor"),
    }


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _original(scaling: Fields, config: Fields, max_position: int) -> int:
    """The context length before scaling. A top-level key takes precedence, as in transformers."""
    inside = scaling.integer("original_max_position_embeddings", max_position)
    return config.integer("original_max_position_embeddings", inside)
