"""Language models as draft models: plain ones, and PARD models (An et al., 2025), whose config.json has ``pard_token``.

``pard_token`` is the id of the mask token, with which a PARD model drafts several positions in one pass."""

import dataclasses

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.huggingface.config import decoder_config, stored_quantization
from jspec.checkpoints.huggingface.multimodal import is_multimodal, text_tensors
from jspec.checkpoints.layouts.format import CheckpointFormat
from jspec.checkpoints.quantized.dequantized_layout import dequantized, require_some, stored_shapes, with_note
from jspec.checkpoints.quantized.gguf import blocks_among
from jspec.checkpoints.quantized.scaled import FP8Blocks, Scaled
from jspec.checkpoints.quantized.scales import holds_otherwise, with_scales, without_cache_scales
from jspec.checkpoints.quantized.stored_weights import with_shared_apart, with_stored_weights
from jspec.checkpoints.tensors.layout import Layout, decoder_layout
from jspec.checkpoints.tensors.names import tensor_table
from jspec.checkpoints.tensors.parts import rearranged_tensors
from jspec.checkpoints.tensors.split_experts import split_experts
from jspec.checkpoints.tensors.stacked_experts import as_in_files
from jspec.config.heads import PardConfig


def read(folder: Folder, fields: Fields, tensors: dict[str, Tensor]) -> Layout:
    """The ``Layout`` of a folder that holds a causal language model, or a multimodal one around it."""
    config, stored = decoder_config(folder, fields), stored_quantization(fields)
    stored = stored or blocks_among(tensors, folder.given)
    text, others = text_tensors(tensors, folder.given) if is_multimodal(fields) else (tensors, frozenset())
    said, config = config, as_in_files(config, text)
    whole = stored if isinstance(stored, Scaled) and config.quantization is not None else None  # what all maps are
    if whole is not None and holds_otherwise(config, text):  # some are not, or some are that jspec keeps in floats
        config, whole = dataclasses.replace(config, quantization=None, other_formats=()), None
    if whole is not None:
        stored = None
    if isinstance(stored, FP8Blocks):
        text = split_experts(config, text, block=stored.block)
    replaced = dequantized(text, stored_shapes(tensor_table(config), rearranged_tensors(config)), stored, folder.given)
    require_some(replaced, stored)
    layout = decoder_layout(with_shared_apart(config, replaced.tensors), replaced.tensors)
    if config.experts != said.experts:
        note = "the experts are not quantised, although quantization_config says that they are in MXFP4"
        layout = dataclasses.replace(layout, notes=(*layout.notes, note))
    if is_multimodal(fields):
        note = f"{len(others)} tensors of other parts than the text model were left out"
        layout = dataclasses.replace(layout, left_out=layout.left_out | others, notes=(*layout.notes, note))
    layout = with_note(layout, replaced)
    if whole is not None:
        return with_scales(layout, whole, folder.given)
    return without_cache_scales(layout) if stored is None else with_stored_weights(layout)


def read_pard(folder: Folder, fields: Fields, tensors: dict[str, Tensor]) -> Layout:
    """The ``Layout`` of a folder that holds a PARD model."""
    layout = read(folder, fields, tensors)
    assert layout.config.language_model is not None
    config = PardConfig(layout.config.language_model, fields.integer("pard_token", low=0))
    return dataclasses.replace(layout, config=config, label=f"PARD model, {layout.label}")


PARD = CheckpointFormat(
    recognises=lambda fields, _: fields.raw.get("pard_token") is not None,
    read=lambda folder, fields, tensors, _: read_pard(folder, fields, tensors),
    needs_target=False,
)
PLAIN = CheckpointFormat(
    recognises=lambda *_: True,  # asked last: a folder that no other format recognised has to be a language model
    read=lambda folder, fields, tensors, _: read(folder, fields, tensors),
    needs_target=False,
)
