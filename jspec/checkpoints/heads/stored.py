"""A resolved config in the manifest of a converted head, so that loading it needs no guess."""

import dataclasses
from typing import Any

from jspec.checkpoints.hf_config import MAX_LAYERS, require_size
from jspec.checkpoints.refusal import Refusal
from jspec.config import ModelConfig, Rope
from jspec.heads import HeadConfig
from jspec.registry import METHODS, resolve

# Fields and parameters of converted folders that were written before these had their present names.
RENAMED_FIELDS = {"taps": "aux_layers", "num_taps": "num_aux_layers", "norm_each_tap": "norm_each_aux"}
RENAMED_PARAMS = {"tap_norms": "aux_norms"}

# Name of the config class of a head -> where it is. A folder with a plain language model describes no head.
KINDS = {path.rpartition(":")[2]: path for path in (method.config for method in METHODS) if path is not None}
del KINDS[ModelConfig.__name__]


def to_json(config: HeadConfig) -> dict[str, Any]:
    """``config`` as JSON values."""
    return {"kind": type(config).__name__, "config": dataclasses.asdict(config)}


def from_json(stored: dict[str, Any], where: str) -> HeadConfig:
    """The inverse of ``to_json``.

    Raises:
      Refusal: ``stored`` is no such object; ``where`` is the file that it comes from.
    """
    try:
        values = {RENAMED_FIELDS.get(name, name): value for name, value in stored["config"].items()}
        kind = resolve(KINDS[stored["kind"]])
        if values.get("aux_layers") == [] and "aux_layers" not in kind.__dataclass_fields__:
            del values["aux_layers"]  # heads that have no choice of layers were once stored with an empty one
        config = kind(**{str(name): _value(value) for name, value in values.items()})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refusal(f"{where}: head is damaged ({error}); convert the checkpoint again") from None
    require_size(config, where)
    return config


def renamed_param(name: str) -> str:
    """The present name of a parameter of a converted folder."""
    first, *rest = name.split(".")
    return ".".join([RENAMED_PARAMS.get(first, first), *rest])


def _value(value: Any) -> Any:
    """What JSON made an object of was a language model, what it made a list of was a tuple."""
    if isinstance(value, dict):
        return _model(value)
    return tuple(value) if isinstance(value, list) else value


def _model(values: dict[str, Any]) -> ModelConfig:
    if values["num_layers"] > MAX_LAYERS:
        raise ValueError(f"num_layers={values['num_layers']!r}: expected at most {MAX_LAYERS}")
    listed = {"windows": tuple(values["windows"]), "eos_token_ids": tuple(values["eos_token_ids"])}
    return ModelConfig(**{**values, **listed, "rope": Rope(**values["rope"])})
