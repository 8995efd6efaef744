"""What is converted: a source checked against its target, reduced and quantised, and the layers beside it."""

import os

from convert.draft_vocabulary import DraftVocabulary, choose
from convert.quantize import quantized
from convert.reduce import reduced, require_whole_vocabulary
from jspec.checkpoints.checkpoint import MTP, Checkpoint, refuse_reduced
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.huggingface.model import HuggingFaceModel
from jspec.checkpoints.layouts.options import HeadOptions
from jspec.checkpoints.tensors.layout import holds_mtp
from jspec.config import ModelConfig


def prepared(
    source: HuggingFaceModel,
    target: Checkpoint | None,
    quantize: str | None,
    mtp: bool | None,
    draft_vocabulary: DraftVocabulary | None,
    corpus: str | os.PathLike | None,
) -> HuggingFaceModel:
    """``source`` as it is to be converted: checked against ``target``, with a draft vocabulary, quantised; arguments as for
    ``convert``, with the target opened."""
    if target is not None:
        require_fit(source, target, needless=draft_vocabulary is None)
    if corpus is not None and draft_vocabulary is None:
        raise Refusal(
            f"corpus={str(corpus)!r}: counts the tokens of a draft vocabulary; give draft_vocabulary, how many"
        )
    if draft_vocabulary is not None and not mtp:
        source = _reduced(source, target, target, draft_vocabulary, corpus)
    return source if quantize is None else quantized(source, quantize)


def mtp_beside(
    source: HuggingFaceModel,
    allow_pickle: bool,
    target: Checkpoint | None,
    mtp: bool | None,
    draft_vocabulary: DraftVocabulary | None,
    corpus: str | os.PathLike | None,
) -> tuple[HuggingFaceModel | None, list[str]]:
    """The multi-token prediction layers beside the language model ``source`` that are to be kept, None if none are.

    Args:
      source: what ``prepared`` returned. Layers with a draft vocabulary have copies of rows of its output head.
      target: its checkpoint, or None.
      allow_pickle, mtp, draft_vocabulary, corpus: as for ``convert``.

    Returns:
      the layers, and notes for the user on them.

    Raises:
      Refusal: they are asked for by name, and there are none, or they cannot be read or have no such draft vocabulary.
    """
    what = "multi-token prediction layers"
    if mtp and not isinstance(source.config, ModelConfig):
        raise Refusal(
            f"{source.folder.given}: mtp=True: keeps {what} beside a language model, and this folder holds no such model "
            f"({source.layout.label}); leave it out"
        )
    if not mtp and not holds_mtp(source.layout):
        return None, []
    if mtp is False:
        return None, [f"{what} are left out"]
    if source.config.reduced:
        return None, [
            f"{what} are left out; with mtp=True (--mtp) they get the draft vocabulary, and their model stays whole"
        ]
    try:
        opened = Checkpoint(source.folder, HeadOptions(mtp=True), allow_pickle).hugging_face
        opened.require_match()
        further = opened if draft_vocabulary is None else _reduced(opened, source, target, draft_vocabulary, corpus)
        of_vocabulary = [f"{MTP}/: {note}" for note in further.layout.notes[len(opened.layout.notes) :]]
        kind, is_kept = source.config.quantization, source.layout.dequantized_instead is not None
        is_plain = not further.layout.holds_scales
        if kind is not None and (not is_kept or (kind in ("int8", "fp8") and is_plain)):
            further = quantized(further, kind)
    except Refusal as refusal:
        if mtp:
            raise
        return None, [f"{what} are left out: {refusal}"]
    return further, [f"{what} are kept in {MTP}/", *of_vocabulary]


def _reduced(
    source: HuggingFaceModel,
    rows_of: HuggingFaceModel | Checkpoint | None,
    target: Checkpoint | None,
    draft_vocabulary: DraftVocabulary,
    corpus: str | os.PathLike | None,
) -> HuggingFaceModel:
    """``source`` with a draft vocabulary. If it has no output head, it gets copies of rows of that of ``rows_of``; the other
    arguments are those of ``convert``."""
    require_whole_vocabulary(source)
    source.require_match()
    return reduced(source, choose(source, draft_vocabulary, corpus, target), rows_of)


def require_fit(source: HuggingFaceModel, target: Checkpoint, needless: bool):
    """Raise a ``Refusal`` unless ``source`` is a draft head that fits the model in ``target``, or a language model while
    ``needless`` is False."""
    where = target.folder.given
    try:
        model = target.config
    except Refusal as error:
        if not isinstance(source.config, ModelConfig):
            raise Refusal(
                f"{error}; a draft head is converted without --target (target=), too, but not checked"
            ) from None
        raise
    if isinstance(source.config, ModelConfig) and needless:
        raise Refusal(f"{source.folder.given}: holds a language model, not a draft head, so no target is needed")
    if not isinstance(model, ModelConfig):
        raise Refusal(f"{where}: is the target to be, but holds a draft head")
    refuse_reduced(model, where)
    try:
        source.config.require_fit(model)
    except ValueError as error:
        raise Refusal(f"{source.folder.given}: {error}") from None
