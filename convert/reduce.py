"""Reduces a drafter to a draft vocabulary: of its output head, the rows of the chosen tokens alone are converted."""

import dataclasses

import numpy as np

from convert.draft_vocabulary import Chosen
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import ComputedTensor, Derived, Tensor
from jspec.checkpoints.huggingface.model import HuggingFaceModel
from jspec.checkpoints.tensors.names import Placement, tensor_table
from jspec.config import ModelConfig
from jspec.config.heads import BlockConfig, Eagle3Config, HeadConfig, MedusaConfig
from jspec.quantization.weight import Weight

HEAD, DRAFT_IDS = "head.weight", "draft_ids"
_OF = "{} (draft vocabulary)"  # names of tensors that no file holds


def require_whole_vocabulary(source: HuggingFaceModel):
    """Raise a ``Refusal`` if a drafter has a draft vocabulary already."""
    sizes = source.config.dimensions
    if source.config.reduced:
        raise Refusal(
            f"{source.folder.given}: draft_vocabulary: this {source.layout.label} has a draft vocabulary of {sizes['Vd']} "
            f"of {sizes['V']} tokens already; convert it without"
        )


def reduced(source: HuggingFaceModel, chosen: Chosen, target: HuggingFaceModel | Checkpoint | None) -> HuggingFaceModel:
    """``source`` with logits for the ``chosen`` tokens only.

    A draft head that borrows the target's output head gets a copy of these rows. A language model whose output head is its
    embedding gets one of its own, and the embedding stays whole.

    Args:
      source: the open folder of the drafter, whose tensors match its config.
      chosen: the tokens.
      target: the checkpoint of the target, or the target itself where it lies in the folder of ``source``. None is enough
        for a drafter that has an output head.

    Raises:
      Refusal: the rows of the target's output head are needed, and ``target`` is None or lends none; or drafters of this
        kind have no draft vocabulary.
    """
    layout, tokens = source.layout, chosen.tokens
    config = _reduced_config(source, chosen)
    old, new = source.shapes, dataclasses.replace(source, layout=dataclasses.replace(layout, config=config)).shapes
    table, tensors = dict(layout.table), dict(layout.tensors)
    for name, at in layout.table.items():
        if new[at.param] != old[at.param]:
            tensors[name], table[name] = _rows(tensors[name], tokens), at._replace(shape=(len(tokens), *at.shape[1:]))
    tensor = next(iter(layout.tensors.values()))
    ids = np.full(chosen.vocab_size, -1, np.int32)
    ids[tokens] = np.arange(len(tokens))
    made: dict[str, Tensor] = {DRAFT_IDS: Derived(DRAFT_IDS, tensor.file, tensor.path, ids.shape, ids.dtype.name, ids)}
    dequantizes = False
    if HEAD not in old and HEAD in new:
        if config.language_model is not None:
            made[HEAD] = _rows_of_output_head(source, tokens)
        elif isinstance(target, HuggingFaceModel):
            target.require_match()
            made[HEAD] = _rows_of_output_head(target, tokens)
        else:
            made[HEAD], dequantizes = _rows_of_target(source, config, tokens, target)
    published = {at.param: name for name, at in tensor_table(config).items()}
    for param, tensor in made.items():
        name = _OF.format(published[param])
        tensors[name], table[name] = tensor, Placement(param, 0, tensor.shape)
    notes = (*layout.notes, chosen.note)
    instead = layout.dequantized_instead
    instead = None if instead is None else reduced(dataclasses.replace(source, layout=instead), chosen, target).layout
    layout = dataclasses.replace(
        layout, config=config, table=table, tensors=tensors, notes=notes, dequantized_instead=instead
    )
    if dequantizes and source.exact_dtype == "bfloat16":  # one tensor of float32 is not to make all of them float32
        note = "the rows of the target's output head are dequantised"
        layout = dataclasses.replace(layout, dequantized=note, notes=(*notes, note))
    return dataclasses.replace(source, layout=layout)


def _reduced_config(source: HuggingFaceModel, chosen: Chosen) -> ModelConfig | HeadConfig:
    config = source.config
    if isinstance(config, MedusaConfig):  # their checkpoints may leave out the vocabulary
        config = dataclasses.replace(config, vocab_size=chosen.vocab_size)
    try:
        return config.with_draft_vocabulary(len(chosen.tokens))
    except ValueError as error:
        raise Refusal(f"{source.folder.given}: {error}") from None


def _rows(tensor: Tensor, rows: np.ndarray) -> ComputedTensor:
    """Some ``rows`` of a tensor, int64 ``[rows]``, which is read as a whole for them."""
    shape = len(rows), *tensor.shape[1:]
    return ComputedTensor.of(tensor, shape, tensor.dtype, lambda index: tensor.read()[rows][index], tensor.check)


def _rows_of_output_head(model: HuggingFaceModel, tokens: np.ndarray) -> ComputedTensor:
    """The rows ``[Vd, D]`` of the output head of a language model, which may be its embedding, as its files have them.

    Their scales are left out. No caller needs them: draft heads in the folder of a target with scales are refused."""
    layout = model.layout.dequantized_instead or model.layout
    names = {at.param: name for name, at in layout.table.items()}
    return _rows(layout.tensors[names[HEAD if HEAD in names else "embedding"]], tokens)


def _rows_of_target(
    source: HuggingFaceModel, config: HeadConfig, tokens: np.ndarray, target: Checkpoint | None
) -> tuple[Derived, bool]:
    """The rows ``[Vd, D]`` of the target's output head, dequantised if they are quantised; and whether they are."""
    where, label = source.folder.given, source.layout.label
    if target is None:
        raise Refusal(
            f"{where}: draft_vocabulary needs a copy of the rows of the target's output head, which this drafter ({label}) "
            "borrows; give the target's folder as target (--target DIR)"
        )
    model, params = target.language_model()
    given = target.folder.given
    scaled = model.logit_softcap is not None or model.logit_divisor != 1
    if scaled and isinstance(config, Eagle3Config | BlockConfig):
        raise Refusal(
            f"{where}: draft_vocabulary: the logits of the target {given} are divided or capped, which a copy of its "
            f"output head in this {label} would not do; convert it without"
        )
    name = "embedding" if model.tie_embeddings else HEAD
    stored = model.stored_params().get(name)
    if stored is None:
        rows = params[name][tokens]
    else:
        arrays = {part: params[param] for part, param in stored.names.items()}
        rows = Weight.of(arrays, stored.form, stored.shape[1])[tokens].dequantize()
    if rows.shape[1] != config.dimensions["D"]:
        raise Refusal(
            f"{where}: draft_vocabulary: the output head of the target {given} reads {rows.shape[1]} numbers and this "
            f"{label} makes {config.dimensions['D']}; convert it without"
        )
    return Derived(
        name, target.folder.root.name, target.folder.root, rows.shape, rows.dtype.name, rows
    ), stored is not None
