"""The config of a draft head as JSON, in the manifest of a folder that ``jspec-convert`` wrote.

Everything that its source left open was settled when it was converted, so loading the folder asks for no options."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.huggingface.config import MAX_LAYERS, require_size
from jspec.config import Experts, Latent, LayerConfig, ModelConfig, Rope
from jspec.config.heads import HeadConfig
from jspec.config.heads.block_corrections import DominoConfig, LiLiCorrConfig
from jspec.config.model_fields import HEAD
from jspec.registry import METHODS, resolve

# Former name -> present name, of config fields and parameters. Folders that earlier versions wrote have the former ones.
RENAMED_FIELDS = {"taps": "aux_layers", "num_taps": "num_aux_layers", "norm_each_tap": "norm_each_aux"}
RENAMED_PARAMS = {"tap_norms": "aux_norms"}
FORMER_FIELDS = ("plain_maps", "quantized_head")  # which ``other_formats`` has taken the place of

NESTED = {"domino": DominoConfig, "lilicorr": LiLiCorrConfig}  # of fields that are no ``ModelConfig``
# Class name of a draft head's config -> import string of that class. A language model is stored without such a config,
# because its config.json describes it.
KINDS = {path.rpartition(":")[2]: path for path in (method.config for method in METHODS) if path is not None}
del KINDS[ModelConfig.__name__]


def to_json(config: HeadConfig) -> dict[str, Any]:
    """``config`` as JSON: ``{"kind": "EagleConfig", "config": {field: value, ...}}``."""
    return {"kind": type(config).__name__, "config": dataclasses.asdict(config)}


def from_json(stored: dict[str, Any], where: str) -> HeadConfig:
    """The config that ``to_json`` made ``stored`` from.

    Args:
      stored: the JSON object.
      where: the file that it comes from, for messages.

    Raises:
      Refusal: ``stored`` does not describe a draft head.
    """
    try:
        values = {RENAMED_FIELDS.get(name, name): value for name, value in stored["config"].items()}
        kind = resolve(KINDS[stored["kind"]])
        if values.get("aux_layers") == [] and "aux_layers" not in kind.__dataclass_fields__:
            del values["aux_layers"]  # earlier versions wrote an empty list for methods that read no auxiliary layers
        config = kind(**{str(name): _value(str(name), value) for name, value in values.items()})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refusal(f"{where}: head is damaged ({error}); convert the checkpoint again") from None
    require_size(config, where)
    return config


def other_formats(values: Mapping[str, Any]) -> tuple[tuple[str, str | None], ...]:
    """``ModelConfig.other_formats`` by the fields of a config, or by a manifest; those of earlier versions say which maps
    are not quantised, and of the output head whether it is."""
    plain = [*values.get("plain_maps", ()), *([] if values.get("quantized_head", True) else [HEAD])]
    return (*((name, None) for name in plain), *(tuple(pair) for pair in values.get("other_formats", ())))


def present_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ``ModelConfig`` with ``other_formats`` in place of those that earlier versions wrote."""
    kept = {name: value for name, value in values.items() if name not in FORMER_FIELDS}
    return {**kept, "other_formats": other_formats(values)}


def renamed_param(name: str) -> str:
    """The present name of a parameter that a converted folder may have under a former name.

    Example: ``tap_norms.0.weight`` becomes ``aux_norms.0.weight``."""
    first, *rest = name.split(".")
    return ".".join([RENAMED_PARAMS.get(first, first), *rest])


def _value(name: str, value: Any) -> Any:
    """The config field ``name`` from its JSON value: an object was a ``ModelConfig``, unless the field's name says that it
    was another, and a list was a tuple."""
    if isinstance(value, dict):
        return _nested(NESTED[name], value) if name in NESTED else _model(value)
    return tuple(value) if isinstance(value, list) else value


def _model(values: dict[str, Any]) -> ModelConfig:
    if values["num_layers"] > MAX_LAYERS:
        raise ValueError(f"num_layers={values['num_layers']!r}: expected at most {MAX_LAYERS}")
    listed = {"windows": tuple(values["windows"]), "eos_token_ids": tuple(values["eos_token_ids"])}
    ropes = tuple(_nested(Rope, rope) for rope in values.get("layer_ropes", ()))
    nested = {"rope": _nested(Rope, values["rope"]), "layer_ropes": ropes}
    nested |= {name: _nested(kind, values.get(name)) for name, kind in (("experts", Experts), ("latent", Latent))}
    layers = tuple(LayerConfig(**layer) for layer in values.get("layers", ()))
    return ModelConfig(**{**present_fields(values), **listed, **nested, "layers": layers})


def _nested(kind: Callable[..., Any], values: dict[str, Any] | None) -> Any:
    """The ``Rope``, ``Experts`` or ``Latent`` that these were the fields of; None if there was none."""
    return None if values is None else kind(**{name: _value(str(name), value) for name, value in values.items()})
