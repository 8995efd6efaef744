"""Telling checkpoints apart, by their config.json and the names of their tensors."""

import dataclasses
from collections.abc import Callable, Iterable

from jspec.checkpoints.fields import Fields
from jspec.checkpoints.folder import Folder
from jspec.checkpoints.heads.format import HeadFormat, architectures
from jspec.checkpoints.heads.options import NOTHING_SAID, HeadOptions
from jspec.checkpoints.heads.wrapping import WRAPPER, native, plain_names
from jspec.checkpoints.hf_config import require_size
from jspec.checkpoints.layout import Layout
from jspec.checkpoints.refusal import Refusal
from jspec.checkpoints.tensor import Tensor
from jspec.registry import METHODS, resolve

# What would be taken for something else -> whether config.json or a tensor's name says so.
_UNSUPPORTED: tuple[tuple[str, Callable[[Fields, Iterable[str]], bool]], ...] = (
    ("DFlash heads", lambda fields, names: "dflash" in architectures(fields) or "hidden_norm.weight" in names),
    (
        "EAGLE heads of NeMo Automodel, which have norms around their layer,",
        lambda fields, _: "llamaeagledraftmodel" in architectures(fields),
    ),
    ("Hydra heads", lambda fields, names: "hydra_num_heads" in fields.raw or any("hydra" in name for name in names)),
    ("PARD-2 models", lambda fields, names: any(key.startswith("pard2") for key in fields.raw)),
)


def is_head(fields: Fields, names: Iterable[str]) -> bool:
    """Whether a folder holds a draft head, which needs a target. PARD does not: it is a language model."""
    wrapped = fields.raw.get("model_type") == WRAPPER
    return wrapped or _format(fields, plain_names(fields, names).values()).needs_target


def recognise(
    folder: Folder, fields: Fields, tensors: dict[str, Tensor], options: HeadOptions = NOTHING_SAID
) -> Layout:
    """What a folder holds, and how its tensors become parameters.

    Args:
      folder: the folder.
      fields: its config.json.
      tensors: what its files hold, by name.
      options: what the user says of an EAGLE-3 head.

    Raises:
      Refusal: it is of no known kind, or config.json and the tensors contradict each other.
    """
    wrapped, has_code = fields.raw.get("model_type") == WRAPPER, bool(fields.raw.get("auto_map"))
    fields, tensors, left_out, notes = native(fields, tensors)
    for what, applies in _UNSUPPORTED:
        if applies(fields, tensors):
            raise Refusal(f"{folder.given}: {what} are not supported")
    found = _format(fields, tensors)
    if wrapped and not found.needs_target:
        raise Refusal(
            f"{fields.where}: model_type={WRAPPER!r} says that this is an EAGLE head, but 'fc.weight' is missing"
        )
    if not found.lists_layers:
        options.refuse_any(folder.given, ("aux_convention", "norm_output"), "EAGLE-3 heads")
        options.refuse_any(folder.given, ("mask_token_id",), "P-EAGLE heads")
    try:
        layout = found.read(folder, fields, tensors, options)
    except Refusal:
        raise
    except ValueError as error:
        raise Refusal(f"{fields.where}: {error}") from None
    require_size(layout.config, fields.where)
    if has_code and found.needs_target:
        notes = (
            *notes,
            f"config.json names code of its own (auto_map), which the weights of {layout.label} do not need",
        )
    return dataclasses.replace(layout, left_out=layout.left_out | left_out, notes=notes)


def describe(layout: Layout, verifier: str | None = None) -> str:
    """``layout`` in a line."""
    target = f", verifier {verifier}" if verifier else ""
    return f"recognised: {layout.label}, {layout.config.summary}{target}"


def _format(fields: Fields, names: Iterable[str]) -> HeadFormat:
    """The first layout in the registry that recognises a folder; the last of them recognises any."""
    paths, present = dict.fromkeys(path for method in METHODS for path in method.formats), set(names)
    formats: Iterable[HeadFormat] = map(resolve, paths)
    return next(one for one in formats if one.recognises(fields, present))
