"""``open_pair``: the checkpoints of a target and of its draft, from folders, GGUF files or names on the hub."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from jspec._validation import is_one_of
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.gguf.names import is_gguf
from jspec.checkpoints.in_memory import InMemory
from jspec.checkpoints.layouts.options import NO_OPTIONS, HeadOptions
from jspec.config import ModelConfig
from jspec.config.heads import HeadConfig
from jspec.hub.folders import local_checkpoints
from jspec.hub.names import is_hub_name
from jspec.loading.options import LoadOptions, Path
from jspec.registry import MTP, DraftMethod, choose, chosen_by_name


@dataclasses.dataclass(frozen=True)
class Pair:
    """The checkpoints of a target and of its drafter, opened.

    Attributes:
      target: the target's checkpoint.
      draft: the draft's checkpoint, a drafting method that has none, as n-gram lookup, or None for plain decoding.
    """

    target: Checkpoint
    draft: Checkpoint | DraftMethod | None

    @property
    def draft_config(self) -> ModelConfig | HeadConfig | None:
        """The config in the draft's checkpoint; None if there is none."""
        return self.draft.config if isinstance(self.draft, Checkpoint) else None

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """That of the target, and that of the draft if it has one."""
        return [one for one in (self.target, self.draft) if isinstance(one, Checkpoint)]

    def require_intact(self, hash_all: bool = True):
        """As ``Checkpoint.require_intact``, of both checkpoints."""
        for checkpoint in self.checkpoints:
            checkpoint.require_intact(hash_all)


def open_pair(target: Path | InMemory, draft: Path | InMemory | None, asked: LoadOptions) -> Pair:
    """The pair that a call of ``jspec.load`` names. A draft that never drafts, because K is 0, is left out.

    Raises:
      ValueError: a folder that is none, or an argument that the drafting method does not take.
    """
    method = choose(draft, asked.method_arguments)
    target_checkpoint, draft_checkpoint = open_checkpoints(target, draft, asked.head, asked.download)
    drafts = asked.speculation.most_draft_tokens > 0
    pair = Pair(target_checkpoint, (draft_checkpoint or method) if drafts else None)
    if asked.check_files:
        pair.require_intact(hash_all=False)  # the rest is hashed when it is loaded
    return pair


def open_checkpoints(
    target: Path | InMemory,
    draft: Path | InMemory | None,
    options: HeadOptions = NO_OPTIONS,
    download: bool | None = False,
) -> tuple[Checkpoint, Checkpoint | None]:
    """The checkpoints of a target and of its draft, None if it has none.

    A draft head in the speculators format names its target. It can be given alone, as ``target``. Multi-token prediction
    layers are in the folder of the target.

    Args:
      target, draft, options: folders, or names on the hub, and what the user said of a draft head.
      download: whether names may be downloaded; ``jspec.hub.folders.local_checkpoints`` explains True, False and None.
    """
    given = {"target": target} | ({} if is_one_of(draft, (None, *chosen_by_name())) else {"draft": draft})
    folders = _folders({what: path for what, path in given.items() if not isinstance(path, InMemory)}, download)

    def opened(what: str, options: HeadOptions) -> Checkpoint:
        model = given[what]
        return model.checkpoint(options) if isinstance(model, InMemory) else Checkpoint.open(folders[what], options)

    checkpoint = opened("target", NO_OPTIONS)
    if is_one_of(draft, (MTP,)):
        return checkpoint, checkpoint.mtp(options)
    if draft is not None:
        return checkpoint, opened("draft", options) if "draft" in given else None
    if checkpoint.target_name is None:
        return checkpoint, None
    head = checkpoint.with_options(options)
    return Checkpoint.open(_target_folder(head.folder.given, checkpoint.target_name, download)), head


def _folders(given: Mapping[str, Any], download: bool | None) -> dict[str, pathlib.Path]:
    """The folder of each checkpoint: argument of ``jspec.load`` -> its value, a folder or a name on the hub."""
    names = []
    for what, path in given.items():
        if not isinstance(path, str | os.PathLike):
            also = f", {', '.join(map(repr, chosen_by_name()))} or None" if what == "draft" else ""
            raise ValueError(
                f"{what}={path!r}: expected the path of a checkpoint folder or a GGUF file, jspec.InMemory{also}"
            )
        folder, name = pathlib.Path(path), str(path)
        if folder.is_file() and not is_gguf(name):
            raise ValueError(f"{what}={name!r} is a file: expected the checkpoint folder that it is in, or a GGUF file")
        if not folder.exists() and not is_hub_name(path):
            raise ValueError(
                f"{what}={name!r}: expected a checkpoint folder, a GGUF file, or the name of a model on the hub, org/name"
            )
        names.append(name)
    folders = map(pathlib.Path, local_checkpoints(names, download))
    return dict(zip(given, folders, strict=True))


def _target_folder(head: str, name: str, download: bool | None) -> pathlib.Path:
    """The folder of the target that the draft head in ``head`` names: as it stands, from the head's own folder, or from
    the hub."""
    for folder in (pathlib.Path(name), pathlib.Path(head, name)):
        if folder.is_dir():
            return folder
    if is_hub_name(name):
        try:
            return pathlib.Path(local_checkpoints([name], download)[0])
        except ValueError as reason:
            raise ValueError(f"target={head!r} is a draft head for another checkpoint: {reason}") from None
    raise ValueError(
        f"target={head!r} is a draft head for {name!r}, which is no folder here; download that checkpoint and give "
        f"its folder as target and {head!r} as draft"
    )
