"""Block drafters in the format of the ``speculators`` package: the types ``dflash``, ``dflash2``, ``dspark`` and ``xpress``.

Settings are at the top of config.json, and those of the layers in ``transformer_layer_config``. Unlike in other layouts, id
k in ``aux_hidden_state_layer_ids`` means the residual stream after k layers. A layer with a window is causal unless
``sliding_window_non_causal`` says otherwise, whose default is true for ``dflash2`` and false for the others; without a
window a layer never is. Either way a window of W tokens ends before the anchor, for every slot of a block."""

from collections.abc import Sequence
from typing import Any

from jspec._validation import require
from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.layouts import block
from jspec.checkpoints.layouts.aux_layers import listed_after
from jspec.checkpoints.layouts.block_corrections import require_exportable
from jspec.checkpoints.layouts.block_dflash2 import CLASS, DEFAULT_CANDIDATES, KIND, is_dflash2, read_sizes, size_fields
from jspec.checkpoints.layouts.block_settings import (
    ANCHOR_KEYS,
    DFLASH,
    refuse_mask_embedding,
    said_of_anchor,
    window_rules,
)
from jspec.checkpoints.layouts.eagle3_settings import Settings
from jspec.checkpoints.layouts.format import CheckpointFormat
from jspec.checkpoints.layouts.layers import read_layers
from jspec.checkpoints.layouts.options import HeadOptions
from jspec.checkpoints.layouts.speculators import (
    BLOCK_KINDS,
    CONFIG,
    LAYERS,
    TYPE,
    VERSION,
    layers_of,
    nested_layer_fields,
    proposal_fields,
    trained_drafts,
)
from jspec.checkpoints.layouts.vocabulary import with_public_vocabulary
from jspec.checkpoints.tensors.layout import Layout
from jspec.config.heads import BlockConfig

IDS = "aux_hidden_state_layer_ids"
XPRESS, DEFAULT_PASSES = "xpress", 6  # of the class in the speculators package
RANK, RATIO, PASSES = "xpress_rank", "xpress_mlp_ratio", "num_jacobi_passes"
JOIN, GATE = "refiner_head.in_proj.weight", "refiner_head.mlp_gate.weight"


def read(folder: Folder, fields: Fields, tensors: dict[str, Tensor], options: HeadOptions) -> Layout:
    """The ``Layout`` of a folder in the speculators format.

    Raises:
      Refusal: config.json and the tensors contradict each other, or a setting is not supported.
    """
    refuse_mask_embedding(folder)
    settings = Settings.of(fields, DFLASH)
    layers = read_layers(layers_of(fields, tensors), tensors, "layers.0.", bias_key="attention_bias")
    dflash2 = is_dflash2(fields, settings, tensors)
    if dflash2 and fields.raw.get(TYPE) != KIND:
        raise fields.refuse(TYPE, f"{KIND!r}, because of what its settings or its tensors are")
    slides = fields.flag("sliding_window_non_causal", dflash2)
    causal = tuple(window is not None and not slides for window in layers.windows)
    aux_layers, first = listed_after(settings, IDS, shift=0, least=0), _anchor_first(settings, fields)
    own: dict[str, Any] = read_sizes(settings, tensors, layers.hidden_size, DEFAULT_CANDIDATES) if dflash2 else {}
    own |= {**window_rules(settings, layers.windows, causal, from_anchor=True), **_refiner(fields, tensors)}
    return block.build(settings, tensors, options, layers, aux_layers, first, causal, own)


def _refiner(fields: Fields, tensors: dict[str, Tensor]) -> dict[str, int]:
    """The fields of ``BlockConfig`` that an XPress head has and others do not."""
    if fields.raw.get(TYPE) != XPRESS:
        return {}
    if not all(name in tensors and len(tensors[name].shape) == 2 and tensors[name].shape[0] for name in (JOIN, GATE)):
        raise fields.refuse(TYPE, f"another type: its files hold no matrices {JOIN!r} and {GATE!r}")
    rank, ratio = tensors[JOIN].shape[0], tensors[GATE].shape[0] // tensors[JOIN].shape[0]
    fields.only(RANK, rank, f"because of the shape of tensor {JOIN!r}")
    fields.only(RATIO, ratio, f"because of the shape of tensor {GATE!r}")
    sizes = rank, ratio, fields.integer(PASSES, DEFAULT_PASSES)
    return dict(zip(("refiner_rank", "refiner_ratio", "refine_passes"), sizes, strict=True))


def _anchor_first(settings: Settings, fields: Fields) -> bool:
    """Whether the anchor's slot drafts, as config.json says it, or else how many tokens it says that are drafted."""
    size, drafts = fields.integer("block_size"), trained_drafts(fields)
    if (said := said_of_anchor(settings)) is not None:
        return said
    if drafts not in (size, size - 1):
        expected = f"true or false, because {drafts} speculative_tokens of a block of {size} do not tell"
        raise fields.refuse(ANCHOR_KEYS[0], expected)
    return drafts == size


def hf_config(config: BlockConfig, target_name: str, target_architectures: Sequence[str]) -> dict[str, Any]:
    """The config.json.

    Raises:
      ValueError: the format cannot state ``config``.
    """
    windows = config.layers.windows
    slides = any(windows) and not any(config.causal)
    plain = tuple(window is not None and not slides for window in windows)
    require(config.causal == plain, "causal", config.causal, f"{plain} in the speculators format")
    require_exportable(config)
    expected = f"{any(plain)} in the speculators format"
    require(config.windows_from_anchor == any(plain), "windows_from_anchor", config.windows_from_anchor, expected)
    require(not config.windows_by_slot, "windows_by_slot", True, "False in the speculators format")
    kind = KIND if config.is_dflash2 else config.method
    classes = {KIND: CLASS, "dspark": "DSparkSpeculator", "dflash": "DFlashSpeculator", XPRESS: "XPressSpeculator"}
    xpress = {RANK: config.refiner_rank, RATIO: config.refiner_ratio, PASSES: config.refine_passes}
    dspark = {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov,
        "enable_confidence_head": config.confidence is not None,
        "confidence_head_with_markov": config.confidence == "markov",
    }
    return {
        "architectures": [classes[kind]],
        TYPE: kind,
        "speculators_version": VERSION,
        IDS: list(config.aux_layers),
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.anchor_first,
        "tie_word_embeddings": False,
        **({"sliding_window_non_causal": slides} if slides or kind == KIND else {}),
        **size_fields(config),
        **(xpress if kind == XPRESS else {}),
        **(dspark if kind == "dspark" or config.confidence is not None else {}),
        LAYERS: nested_layer_fields(config.layers),
        CONFIG: proposal_fields(kind, config.max_drafts, target_name, target_architectures),
    }


FORMAT = CheckpointFormat(
    recognises=lambda fields, _: fields.raw.get(TYPE) in BLOCK_KINDS,
    read=read,
    write_config=hf_config,
    write_tensors=with_public_vocabulary,
    lists_layers=True,
    classes=("DFlashSpeculator", "DSparkSpeculator", "XPressSpeculator", "XPressDraftModel", *block.CLASSES),
    name="speculators",
)
