"""A resolved config in the manifest of a converted head, so that loading it needs no guess."""

import dataclasses
from typing import Any

from jspec.checkpoints.hf_config import MAX_LAYERS, require_size
from jspec.checkpoints.refusal import Refusal
from jspec.config import ModelConfig, Rope
from jspec.heads import Eagle3Config, EagleConfig, HeadConfig, MedusaConfig, MLPConfig, PardConfig

# Fields and parameters of converted folders that were written before these had their present names.
RENAMED_FIELDS = {"taps": "aux_layers", "num_taps": "num_aux_layers", "norm_each_tap": "norm_each_aux"}
RENAMED_PARAMS = {"tap_norms": "aux_norms"}

KINDS = {kind.__name__: kind for kind in (EagleConfig, Eagle3Config, PardConfig, MLPConfig, MedusaConfig)}


def to_json(config: HeadConfig) -> dict[str, Any]:
    """``config`` as JSON values."""
    return {"kind": type(config).__name__, "config": dataclasses.asdict(config)}


def from_json(stored: dict[str, Any], where: str) -> HeadConfig:
    """The inverse of ``to_json``.

    Raises:
      Refusal: ``stored`` is no such object; ``where`` is the file that it comes from.
    """
    try:
        values: dict[str, Any] = dict(stored["config"])
        for old, new in RENAMED_FIELDS.items():
            if old in values:
                values[new] = values.pop(old)
        for key in ("layers", "model"):
            if key in values:
                values[key] = _model(values[key])
        if values.get("aux_layers") is not None:
            values["aux_layers"] = tuple(values["aux_layers"])
        config = KINDS[stored["kind"]](**values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refusal(f"{where}: head is damaged ({error}); convert the checkpoint again") from None
    require_size(config, where)
    return config


def renamed_param(name: str) -> str:
    """The present name of a parameter of a converted folder."""
    first, *rest = name.split(".")
    return ".".join([RENAMED_PARAMS.get(first, first), *rest])


def _model(values: dict[str, Any]) -> ModelConfig:
    if values["num_layers"] > MAX_LAYERS:
        raise ValueError(f"num_layers={values['num_layers']!r}: expected at most {MAX_LAYERS}")
    listed = {"windows": tuple(values["windows"]), "eos_token_ids": tuple(values["eos_token_ids"])}
    return ModelConfig(**{**values, **listed, "rope": Rope(**values["rope"])})
