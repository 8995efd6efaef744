"""What the config.json of published draft heads leaves open, by repository: ``aux_convention`` and ``norm_output``.

A head is recognised by the folder that it is in and by the layer ids in its config.json, so that another head in a folder
of that name is not mistaken for it. Every entry has a source that settles it: a measurement, or the code that trained the
head. Heads of which only guesses are known have no entry; ``jspec doctor`` measures them. No digest of weights is
compared, because none of these files was there to be read when the table was written.
"""

import dataclasses
import pathlib

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.layouts.aux_layers import IDS
from jspec.checkpoints.layouts.options import HeadOptions, OpenSetting
from jspec.config.heads import AUX_CONVENTIONS


@dataclasses.dataclass(frozen=True)
class PublishedHead:
    """What is known of a published head.

    Attributes:
      source: where that is settled.
      ids: its ``eagle_aux_hidden_state_layer_ids``; None if they do not tell it from others.
      aux_convention, norm_output: as in ``HeadOptions``; None where config.json leaves nothing open.
      disputed: whether the source contradicts what config.json says its layer ids mean, so that the user has to say it.
    """

    source: str
    ids: tuple[int, ...] | None = None
    aux_convention: str | None = None
    norm_output: str | None = None
    disputed: bool = False


_SPECFORGE = "https://github.com/sgl-project/SpecForge/blob"
PUBLISHED = {
    # SGLang read these ids as outputs, failed, and measured an acceptance length of 2.68 with inputs.
    "nvidia/gpt-oss-120b-Eagle3-v3": PublishedHead(
        "https://github.com/sgl-project/sglang/pull/32334", (24, 30, 36), aux_convention="input_of"
    ),
    # SGLang reads its ids as inputs, and the tool that trained it means outputs.
    "nvidia/gpt-oss-120b-Eagle3-long-context": PublishedHead("https://github.com/sgl-project/sglang", disputed=True),
    # Trained with SpecForge, whose code takes ``hidden_states[id + 1]``.
    "lmsys/EAGLE3-gpt-oss-120b-bf16": PublishedHead(
        f"{_SPECFORGE}/94d67101/specforge/core/eagle3.py", (1, 17, 33), aux_convention="output_of"
    ),
    "lmsys/Qwen3-235B-A22B-EAGLE3": PublishedHead(
        f"{_SPECFORGE}/cbb0d956/configs/qwen3-235B-A22B-eagle3.json", (1, 46, 90), aux_convention="output_of"
    ),
    # The author's own change of vLLM feeds back what the final norm returns.
    **dict.fromkeys(
        ("Dogacel/specdrift-gpt-oss-20b-eagle3", "Dogacel/specdrift-gpt-oss-120b-eagle3"),
        PublishedHead("https://github.com/vllm-project/vllm/pull/42764", norm_output="recycled"),
    ),
}


def repository_of(folder: str) -> str | None:
    """The repository in ``PUBLISHED`` that a folder was downloaded from, by its path; None if it is none of them.

    Paths are those of the hub's cache, ``models--org--name/snapshots/<revision>``, and those that end with the name, with
    or without its organisation in front."""
    parts = pathlib.PurePath(folder).parts
    for name in PUBLISHED:
        organisation, own = name.split("/")
        cached = f"models--{organisation}--{own}" in parts[-3:-1]
        if cached or (parts and parts[-1] in (own, f"{organisation}--{own}", f"{organisation}_{own}")):
            return name
    return None


def answered(folder: Folder, fields: Fields, options: HeadOptions) -> tuple[HeadOptions, tuple[str, ...]]:
    """``options`` with what is known of a published head, and a note with its source; unchanged for any other head.

    Args:
      folder: the draft head's.
      fields: its config.json.
      options: of the user, which count more.

    Raises:
      OpenSetting: what the head's layer ids mean is disputed, and the user did not say it.
    """
    name = repository_of(str(folder.root)) or repository_of(folder.given)
    head = PUBLISHED.get(name or "")
    if head is None or (head.ids is not None and list(head.ids) != _listed(fields)):
        return options, ()
    if head.disputed and options.aux_convention is None:
        raise OpenSetting(
            f"{folder.given}: {name} lists layer ids, which {head.source} reads as inputs of these layers, against its own "
            "config.json, by which they are outputs; say which: --aux-convention input_of or output_of (aux_convention=)",
            "aux_convention",
            AUX_CONVENTIONS,
        )
    known = {field: getattr(head, field) for field in ("aux_convention", "norm_output")}
    added = {field: value for field, value in known.items() if value is not None and getattr(options, field) is None}
    if not added:
        return options, ()
    said = " and ".join(f"{field}={value!r}" for field, value in added.items())
    return dataclasses.replace(options, **added), (f"{name}: read with {said}, by {head.source}",)


def _listed(fields: Fields) -> object:
    """The layer ids in config.json, at the top or in ``eagle_config``."""
    inner = fields.raw.get("eagle_config")
    nested = inner.get(IDS) if isinstance(inner, dict) else None
    return fields.raw.get(IDS) if nested is None else nested
