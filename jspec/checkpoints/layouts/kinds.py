"""Recognises what a checkpoint holds, by its config.json and the names of its tensors.

The package docstring (``jspec.checkpoints.layouts``) says how the layouts are asked."""

import dataclasses
import re
from collections.abc import Callable, Iterable

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.huggingface.config import require_size, stored_quantization
from jspec.checkpoints.huggingface.families import FAMILIES
from jspec.checkpoints.huggingface.multimodal import WRAPPERS, has_text_config
from jspec.checkpoints.huggingface.unread_keys import warn_of_unread_keys
from jspec.checkpoints.layouts.format import CheckpointFormat, architectures, refuse_gemma
from jspec.checkpoints.layouts.mtp import FORMAT as MTP
from jspec.checkpoints.layouts.mtp_speculators import FORMAT as MTP_OF_SPECULATORS
from jspec.checkpoints.layouts.options import NO_OPTIONS, HeadOptions
from jspec.checkpoints.layouts.published import answered
from jspec.checkpoints.layouts.quantized import dequantized_head, names_of_weights, without_quantization
from jspec.checkpoints.layouts.speculators import KINDS, TYPE
from jspec.checkpoints.layouts.wrapping import WRAPPER, names_without_prefix, unwrap
from jspec.checkpoints.quantized.dequantized_layout import Replaced, with_note
from jspec.checkpoints.quantized.scaled import Scaled
from jspec.checkpoints.quantized.stored_weights import with_stored_weights
from jspec.checkpoints.tensors.layout import Layout
from jspec.registry import METHODS, resolve

_NAMES = ("architectures", "model_type", TYPE)  # keys that may name a kind
# Kinds of checkpoints that jspec refuses, each with the test that finds it. A supported layout would recognise them too:
# a DFlash2Beam head, for example, has the tensors of a DFlash2 head, but computes something else.
_UNSUPPORTED: tuple[tuple[str, Callable[[Fields, Iterable[str]], bool]], ...] = (
    (
        "EAGLE-4 heads, whose code is source-available under no open licence, so that jspec does not implement them,",
        lambda fields, _: "eagle4" in re.sub("[-_]", "", str([fields.raw.get(key) for key in _NAMES]).lower()),
    ),
    ("DFlash2Beam heads", lambda fields, _: "dflash2beam" in architectures(fields)),
    ("Hydra heads", lambda fields, names: "hydra_num_heads" in fields.raw or any("hydra" in name for name in names)),
    ("PARD-2 models", lambda fields, names: any(key.startswith("pard2") for key in fields.raw)),
)


def is_head(fields: Fields, names: Iterable[str]) -> bool:
    """Whether a folder holds a draft head, which needs a target. A PARD model is no draft head: it is a language model.

    Args:
      fields: its config.json.
      names: the names of its tensors.
    """
    wrapped = fields.raw.get("model_type") == WRAPPER
    return wrapped or _format_of_files(fields, names).needs_target


def recognise(folder: Folder, fields: Fields, tensors: dict[str, Tensor], options: HeadOptions = NO_OPTIONS) -> Layout:
    """The ``Layout`` of a folder: the config of its model or draft head, and where each tensor goes.

    Args:
      folder: the folder.
      fields: its config.json.
      tensors: name -> tensor, for every tensor in its files.
      options: the settings of an EAGLE-3 head that the user gave.

    Raises:
      Refusal: no supported layout fits, or config.json and the tensors contradict each other.
    """
    wrapped, has_code = fields.raw.get("model_type") == WRAPPER, bool(fields.raw.get("auto_map"))
    fields, replaced = _dequantized(folder, fields, tensors, options)
    fields, tensors, left_out, notes = unwrap(fields, replaced.tensors)
    for what, applies in _UNSUPPORTED:
        if applies(fields, tensors):
            raise Refusal(f"{folder.given}: {what} are not supported")
    head_format = MTP if options.mtp else _format(fields, tensors)
    _require_known_class(fields, head_format)
    if wrapped and not head_format.needs_target:
        raise Refusal(
            f"{fields.where}: model_type={WRAPPER!r} says that this is an EAGLE head, but 'fc.weight' is missing"
        )
    if head_format.lists_layers and head_format.name == "native":
        options, known = answered(folder, fields, options)
        notes = (*notes, *known)
    if not head_format.lists_layers:
        options.refuse_any(folder.given, ("aux_convention",), "EAGLE-3 heads")
        options.refuse_any(folder.given, ("mask_token_id",), "P-EAGLE heads")
    if head_format not in (MTP, MTP_OF_SPECULATORS):
        options.refuse_any(folder.given, ("mask_first",), "multi-token prediction layers")
        if not head_format.lists_layers:
            options.refuse_any(folder.given, ("norm_output",), "EAGLE-3 heads and multi-token prediction layers")
    try:
        layout = head_format.read(folder, fields, tensors, options)
    except Refusal:
        raise
    except ValueError as error:
        raise Refusal(f"{fields.where}: {error}") from None
    layout = with_note(layout, replaced)
    if replaced.note and layout.config.decoder is not None:  # other configs have one format for all maps
        layout = with_stored_weights(layout)
    require_size(layout.config, fields.where)
    warn_of_unread_keys(fields, multimodal=has_text_config(fields))
    if has_code and head_format.needs_target:
        notes = (
            *notes,
            f"config.json names code of its own (auto_map), which the weights of {layout.label} do not need",
        )
    return dataclasses.replace(layout, left_out=layout.left_out | left_out, notes=(*notes, *layout.notes))


def _require_known_class(fields: Fields, head_format: CheckpointFormat):
    """Raise a ``Refusal`` if config.json names a class that no draft head of this format has.

    A head of an unknown class may have a known head's tensors and compute something else, which would only show in how many
    drafts are accepted. A folder that names no class is recognised by its tensors alone."""
    given, known, kind = fields.raw.get("architectures"), head_format.classes, fields.raw.get(TYPE)
    if not given or known is None or kind not in (None, *KINDS):  # the reader refuses an unknown type
        return
    of_target = (*FAMILIES, *WRAPPERS) if head_format.names_target else ()
    may = {name.lower() for name in (*known, *of_target)}
    if not all(str(name).lower() in may for name in (given if isinstance(given, list) else [given])):
        refuse_gemma(fields)
        target = ", or the class of its target" if of_target else ""
        raise fields.refuse(
            "architectures",
            f"the class of a draft head that jspec knows, because another one may compute something else from the same "
            f"tensors; with these it knows {', '.join(known)}{target}",
        )


def _dequantized(
    folder: Folder, fields: Fields, tensors: dict[str, Tensor], options: HeadOptions
) -> tuple[Fields, Replaced]:
    """config.json and tensors of a draft head without quantisation. Other checkpoints are returned unchanged; their reader
    dequantises."""
    head_format = MTP if options.mtp else _format_of_files(fields, tensors)
    reads_itself = head_format is MTP and not isinstance(stored_quantization(fields), Scaled | None)
    if not head_format.needs_target or reads_itself:
        return fields, Replaced(tensors)
    return without_quantization(fields), dequantized_head(fields, tensors, folder.given)


def _format_of_files(fields: Fields, names: Iterable[str]) -> CheckpointFormat:
    """``_format`` by the names of the tensors in the files, which may have a prefix, or stand for weights."""
    return _format(fields, names_without_prefix(fields, names_of_weights(names)).values())


def _format(fields: Fields, names: Iterable[str]) -> CheckpointFormat:
    """The first format in the registry that recognises a folder. The last one, a language model, recognises any."""
    paths, present = dict.fromkeys(path for method in METHODS for path in method.formats), set(names)
    formats: Iterable[CheckpointFormat] = map(resolve, paths)
    return next(head_format for head_format in formats if head_format.recognises(fields, present))
