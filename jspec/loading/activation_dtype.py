"""Checks that a target can round the inputs of its linear maps to eight bits, as W8A8 does.

Such a target is another model than the same target without that, as one with quantised weights is. So its user decides, and
drafts change nothing about it. Which maps round ``jspec.models.w8a8`` says."""

import warnings
from collections.abc import Iterator

from jspec._validation import require
from jspec.config import ModelConfig
from jspec.config.engine import ACTIVATION_DTYPES


def check_activation_dtype(kind: str, target: ModelConfig):
    """Refuse a type of ``EngineConfig.activation_dtype`` that no map of a target rounds its inputs to, and name experts
    that do not round theirs in a warning.

    Raises:
      ValueError: no map of a layer is stored in that type with a scale for each output channel.
    """
    if kind == "auto":
        return
    stored, rounding = target.formats or "the dtype of the model", set(_rounded_to(target))
    others = "".join(f"activation_dtype={other!r}, " for other in ACTIVATION_DTYPES if other in rounding)
    made = f"make such weights with jspec-convert --quantize {kind} from a checkpoint that is not quantised"
    require(
        kind in rounding,
        "activation_dtype",
        kind,
        f"{others}'auto', or a checkpoint with maps of layers in {kind} with a scale for each output channel: those of this "
        f"one are stored as {stored}; {made}",
    )
    experts = [layer for layer in range(target.num_layers) if target.has_experts(layer)]
    if experts:
        warnings.warn(
            f"activation_dtype={kind!r}: experts of {len(experts)} layers read inputs that are not rounded, because their "
            "kernels multiply in the dtype of the model",
            stacklevel=4,
        )


def _rounded_to(target: ModelConfig) -> Iterator[str]:
    """The format of each map of a layer that can round its inputs to the type of its weights."""
    beside = target.experts is not None and target.experts.beside_mlp
    for name, stored in target.stored_params().items():
        outer, *inner = name.split(".")
        if outer != "layers":
            continue
        number, part, *rest = inner
        of_experts = part == "beside" or (part == "mlp" and target.has_experts(int(number)) and not beside)
        of_latents = part == "attention" and rest[0] in ("keys", "values")
        if not of_experts and not of_latents:
            yield stored.form.name
