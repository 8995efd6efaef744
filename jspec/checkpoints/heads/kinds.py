"""Telling checkpoints apart, by their config.json and the names of their tensors."""

from collections.abc import Callable, Iterable

from jspec.checkpoints.fields import Fields
from jspec.checkpoints.folder import Folder
from jspec.checkpoints.heads.format import HeadFormat, architectures
from jspec.checkpoints.hf_config import require_size
from jspec.checkpoints.layout import Layout
from jspec.checkpoints.refusal import Refusal
from jspec.checkpoints.tensor import Tensor
from jspec.registry import METHODS, resolve

# What would be taken for something else -> whether config.json or a tensor's name says so.
_UNSUPPORTED: tuple[tuple[str, Callable[[Fields, Iterable[str]], bool]], ...] = (
    ("DFlash heads", lambda fields, names: "dflash" in architectures(fields) or "hidden_norm.weight" in names),
    ("Hydra heads", lambda fields, names: "hydra_num_heads" in fields.raw or any("hydra" in name for name in names)),
    ("PARD-2 models", lambda fields, names: any(key.startswith("pard2") for key in fields.raw)),
    ("heads in vLLM's wrapper of EAGLE configs", lambda fields, _: fields.raw.get("model_type") == "eagle"),
)


def is_head(fields: Fields, names: Iterable[str]) -> bool:
    """Whether a folder holds a draft head, which needs a target. PARD does not: it is a language model."""
    return _format(fields, names).needs_target


def recognise(folder: Folder, fields: Fields, tensors: dict[str, Tensor], aux_convention: str | None = None) -> Layout:
    """What a folder holds, and how its tensors become parameters.

    Args:
      folder: the folder.
      fields: its config.json.
      tensors: what its files hold, by name.
      aux_convention: what the layer ids of an EAGLE-3 head mean: ``input_of`` or ``output_of`` these layers.

    Raises:
      Refusal: it is of no known kind, or config.json and the tensors contradict each other.
    """
    for what, applies in _UNSUPPORTED:
        if applies(fields, tensors):
            raise Refusal(f"{folder.given}: {what} are not supported")
    found = _format(fields, tensors)
    if aux_convention is not None and not found.lists_layers:
        raise Refusal(f"{folder.given}: aux_convention={aux_convention!r} is for EAGLE-3 heads, and this is none")
    try:
        layout = found.read(folder, fields, tensors, aux_convention)
    except Refusal:
        raise
    except ValueError as error:
        raise Refusal(f"{fields.where}: {error}") from None
    require_size(layout.config, fields.where)
    return layout


def describe(layout: Layout, verifier: str | None = None) -> str:
    """``layout`` in a line."""
    target = f", verifier {verifier}" if verifier else ""
    return f"recognised: {layout.label}, {layout.config.summary}{target}"


def _format(fields: Fields, names: Iterable[str]) -> HeadFormat:
    """The first layout in the registry that recognises a folder; the last of them recognises any."""
    paths, present = dict.fromkeys(path for method in METHODS for path in method.formats), set(names)
    formats: Iterable[HeadFormat] = map(resolve, paths)
    return next(one for one in formats if one.recognises(fields, present))
