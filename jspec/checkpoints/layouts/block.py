"""Block drafters in the layouts of z-lab (DFlash, DFlash2), JetSpec, SpecForge and DeepSpec (DSpark and its DFlash).

The layers have the same tensors in all of them: ``fc``, ``hidden_norm``, ``norm``, and ``layers.i.*`` as in Qwen3. The
settings differ in where they are and in what they mean:

| | z-lab, JetSpec | SpecForge | DeepSpec |
|---|---|---|---|
| ``target_layer_ids``, ``mask_token_id`` | in ``dflash_config`` | in ``dflash_config`` | at the top |
| first slot that drafts | the second | the anchor's | the anchor's |
| block attention | both ways; causal with ``causal_head``, and in layers with a window | the same | both ways |
| beside the layers | nothing; DFlash2: see below | Markov and confidence heads | these, copies of embedding and head |

What a DFlash2 head has beside the layers, and in them, ``block_dflash2`` reads, and ``block_corrections`` what Domino and
LiLiCorr heads have, which Model Optimizer writes in z-lab's layout. Layer id i means the residual stream after layer i, so
-1 is the embedding. Nothing in a DFlash head's tensors says which slot drafts first: the class in ``architectures`` decides,
or that it is a Domino head, unless ``sample_from_anchor`` says it, or ``query_zero_predicts_next``, which means the same.
Either may be in ``dflash_config`` or at the top, in every layout (``jspec.checkpoints.layouts.block_settings``)."""

import os
from collections.abc import Collection, Mapping
from typing import Any

from jspec._validation import require
from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.layouts.aux_layers import OUTPUT_IDS, given_aux_layers
from jspec.checkpoints.layouts.block_corrections import KINDS, read_correction, require_exportable
from jspec.checkpoints.layouts.block_dflash2 import CLASS, is_dflash2, read_sizes, size_fields
from jspec.checkpoints.layouts.block_settings import (
    ANCHOR_KEYS,
    DFLASH,
    PROJECTOR,
    causal,
    projector,
    refuse_mask_embedding,
    require_supported,
    said_of_anchor,
    window_rules,
    with_windows_of_all,
)
from jspec.checkpoints.layouts.eagle3_settings import Settings
from jspec.checkpoints.layouts.format import CheckpointFormat, architectures
from jspec.checkpoints.layouts.layers import layer_fields, num_numbered_layers, read_layers, window_fields
from jspec.checkpoints.layouts.options import HeadOptions
from jspec.checkpoints.layouts.vocabulary import D2T, T2D, with_draft_ids, with_public_vocabulary
from jspec.checkpoints.tensors.layout import Layout
from jspec.checkpoints.tensors.names import OUTPUT_HEAD, tensor_table
from jspec.config.heads import EMBEDDING, BlockConfig

CLASSES = ("DFlashDraftModel", CLASS, "DSparkDraftModel", "Qwen3DSparkModel", "DominoDraftModel", "LiLiCorrDraftModel")
TYPE_OF_SPECULATORS = "speculators_model_type"  # in that format alone
MARKOV, CONFIDENCE = "markov_head.markov_w1.weight", "confidence_head.proj.weight"


def read(folder: Folder, fields: Fields, tensors: dict[str, Tensor], options: HeadOptions) -> Layout:
    """The ``Layout`` of a folder in one of the native layouts.

    Raises:
      Refusal: config.json and the tensors contradict each other, or a setting is not supported.
    """
    refuse_mask_embedding(folder)
    settings, tensors = Settings.of(fields, DFLASH), _with_names_of_deepspec(tensors)
    anchor_first, layers = said_of_anchor(settings), _layers(fields, tensors)
    own = read_correction(fields, settings, tensors, layers.hidden_size)
    if anchor_first is None:
        anchor_first = "dspark" in architectures(fields) or projector(settings) == "dspark" or "domino" in own
    aux_layers = given_aux_layers(settings, options.aux_convention, least=-1)
    if aux_layers is None:
        raise settings.refuse(OUTPUT_IDS, "a list of layer ids of at least -1")
    if not own and is_dflash2(fields, settings, tensors):
        own = read_sizes(settings, tensors, layers.hidden_size, None)
    each, layers = causal(settings, layers.windows), with_windows_of_all(settings, layers)
    own = {**own, **window_rules(settings, layers.windows, each)}
    return build(settings, tensors, options, layers, aux_layers, anchor_first, each, own)


def build(
    settings: Settings,
    tensors: dict[str, Tensor],
    options: HeadOptions,
    layers,
    aux_layers: tuple[int, ...],
    anchor_first: bool,
    causal: tuple[bool, ...],
    own: Mapping[str, Any],
) -> Layout:
    """The ``Layout`` of a block drafter.

    Args:
      settings: where config.json has settings.
      tensors: name -> tensor, for every tensor in the files.
      options: of the user.
      layers: the config of the layers.
      aux_layers, anchor_first, causal: as in ``BlockConfig``.
      own: the fields of ``BlockConfig`` that not every head has.

    Raises:
      Refusal: config.json and the tensors contradict each other, or a setting is not supported.
    """
    top = settings.objects[-1]
    require_supported(settings, layers.windows, anchor_first)
    if (kind := projector(settings)) in KINDS and kind not in own:
        raise settings.refuse(PROJECTOR, "'dflash', 'dflash2' or 'dspark' in the speculators format")
    markov, rank = _markov(settings, tensors)
    size = settings.integer("block_size")
    top.only("block_size", size, f"as in {DFLASH}")  # Model Optimizer writes that of DFlash2 heads twice
    config = BlockConfig(
        layers=layers,
        draft_vocab_size=_draft_vocab_size(settings, tensors, layers.vocab_size),
        target_hidden_size=_target_size(top, tensors, len(aux_layers)),
        aux_layers=aux_layers,
        block_size=size,
        mask_token_id=settings.mask_token(layers.vocab_size, options.mask_token_id),
        anchor_first=anchor_first,
        causal=causal,
        markov=markov,
        markov_rank=rank,
        confidence=_confidence(top, tensors, layers.hidden_size, rank),
        own_embedding=EMBEDDING in tensors,
        own_head=OUTPUT_HEAD in tensors,
        **own,
    )
    replaced = with_draft_ids(os.path.dirname(top.where), tensors, config.draft_vocab_size, layers.vocab_size)
    return Layout(config, _label(config), tensor_table(config), replaced, left_out=frozenset((D2T, T2D)))


def _with_names_of_deepspec(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a DSpark head with the names that DeepSpec gives them. Model Optimizer (0.48) leaves out those of the
    modules around them."""
    if "markov_w1.weight" not in tensors or any(name.startswith("markov_head.") for name in tensors):
        return tensors
    starts = {name: f"markov_head.{name}" for name in ("markov_w1", "markov_w2", "gate_proj", "joint_proj")}
    starts["confidence_proj"] = "confidence_head.proj"
    parts = ((name.partition("."), tensor) for name, tensor in tensors.items())
    return {starts.get(first, first) + dot + rest: tensor for (first, dot, rest), tensor in parts}


def _label(config: BlockConfig) -> str:
    for has, name in ((config.is_dflash2, "DFlash2"), (config.domino, "Domino"), (config.lilicorr, "LiLiCorr")):
        if has:
            return f"{name} head"
    dflash = "JetSpec head" if all(config.causal) else "DFlash head"
    return {"dflash": dflash, "dspark": "DSpark head", "xpress": "XPress head"}[config.method]


def _layers(fields: Fields, tensors: dict[str, Tensor]):
    """The config of the layers, of which the files hold as many as config.json says."""
    count = num_numbered_layers(tensors)
    fields.only("num_hidden_layers", count, "as many layers as the files hold tensors of")
    return read_layers(fields, tensors, "layers.0.", bias_key="attention_bias")


def _target_size(top: Fields, tensors: dict[str, Tensor], count: int) -> int:
    """Width of the target: ``fc.weight`` reads so many numbers of each of ``count`` auxiliary hidden states."""
    if "fc.weight" not in tensors or len(tensors["fc.weight"].shape) != 2:
        raise Refusal(
            f"{top.where}: tensor 'fc.weight' is missing, which fuses what a block drafter reads of its target"
        )
    width = tensors["fc.weight"].shape[1]
    if not width or width % count:
        raise Refusal(
            f"{top.where}: tensor 'fc.weight' reads {width} numbers, expected a multiple of {count}, the number of layer ids"
        )
    return width // count


def _draft_vocab_size(settings: Settings, tensors: dict[str, Tensor], vocab_size: int) -> int:
    """Vd: the rows of the head's own output head, or else the target's vocabulary."""
    weight = tensors.get(OUTPUT_HEAD)
    Vd = vocab_size if weight is None else weight.shape[0]
    settings.only("draft_vocab_size", Vd, "the output channels of the output head")
    return Vd


def _markov(settings: Settings, tensors: dict[str, Tensor]) -> tuple[str | None, int]:
    """The kind of the Markov head and its rank; (None, 0) if the files hold none."""
    weight = tensors.get(MARKOV)
    rank = 0 if weight is None else weight.shape[-1]
    if settings.integer("markov_rank", rank, low=0) != rank:
        expected = "0 or none, because the files hold no Markov head" if not rank else f"{rank}, the width of {MARKOV}"
        raise settings.refuse("markov_rank", expected)
    if not rank:
        return None, 0
    kind = settings.text("markov_head_type", "vanilla")
    extra = {"gated": "markov_head.gate_proj.weight", "rnn": "markov_head.joint_proj.weight"}
    for other, name in extra.items():
        if (name in tensors) != (kind == other):
            expected = f"{other!r}, because tensor {name!r} is there" if name in tensors else "vanilla"
            raise settings.refuse("markov_head_type", expected)
    return kind, rank


def _confidence(top: Fields, tensors: dict[str, Tensor], hidden_size: int, rank: int) -> str | None:
    """What the confidence head reads; None if the files hold none."""
    weight = tensors.get(CONFIDENCE)
    if weight is None:
        return None
    widths = {hidden_size: "hidden", hidden_size + rank: "markov"} if rank else {hidden_size: "hidden"}
    if weight.shape[-1] not in widths:
        raise Refusal(
            f"{top.where}: tensor {CONFIDENCE!r} reads {weight.shape[-1]} numbers, expected one of {sorted(widths)}"
        )
    return widths[weight.shape[-1]]


def hf_config(config: BlockConfig, target_name: str) -> dict[str, Any]:
    """The config.json: of DeepSpec's layout for heads whose anchor drafts and for DSpark heads, of z-lab's for others.

    DeepSpec's layout has neither causal layers nor windows, nor DFlash2 heads. A head whose first draft is not where the
    class of its layout has it says so under ``ANCHOR_KEYS``.

    Raises:
      ValueError: neither layout can state ``config``.
    """
    require_exportable(config)
    require(not config.refiner_rank, "refiner_rank", config.refiner_rank, "0 in this layout")
    windows = config.layers.windows
    ids = [k - 1 for k in config.aux_layers]
    shared = {
        **layer_fields(config.layers),
        **window_fields(config.layers),
        "attention_bias": config.layers.qkv_bias,
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_model_name_or_path": target_name,
        "tie_word_embeddings": False,
    }
    anchor: dict[str, bool] = dict.fromkeys(ANCHOR_KEYS, config.anchor_first)
    if config.is_dflash2 or any(config.causal) or any(windows) or not (config.anchor_first or config.markov):
        every, plain = all(config.causal), tuple(window is not None for window in windows)
        both_ways = {"is_causal": False} if config.is_dflash2 and any(windows) and not any(config.causal) else {}
        stated = every or config.causal == plain or bool(both_ways)
        require(stated, "causal", config.causal, f"True for each layer, or {plain}")
        require(not config.windows_from_anchor, "windows_from_anchor", True, "False in this layout")
        theirs = any(window and not flag for flag, window in zip(config.causal, windows, strict=True))
        require(config.windows_by_slot == theirs, "windows_by_slot", not theirs, f"{theirs} in this layout")
        require(config.markov is None, "markov", config.markov, "None where a layer is causal or has a window")
        dflash = {"mask_token_id": config.mask_token_id, OUTPUT_IDS: ids, **({"causal_head": True} if every else {})}
        own = {DFLASH: dflash | size_fields(config) | (anchor if config.anchor_first else {})}
        return {"architectures": [CLASS if config.is_dflash2 else "DFlashDraftModel"], **shared, **both_ways, **own}
    markov = {"markov_head_type": config.markov} if config.markov is not None else {}
    return {
        "architectures": ["Qwen3DSparkModel"],
        **shared,
        OUTPUT_IDS: ids,
        "mask_token_id": config.mask_token_id,
        "markov_rank": config.markov_rank,
        **markov,
        **(anchor if not config.anchor_first else {}),
        "enable_confidence_head": config.confidence is not None,
        "confidence_head_with_markov": config.confidence == "markov",
    }


def recognises(fields: Fields, names: Collection[str]) -> bool:
    """Whether a folder holds a block drafter in one of these layouts."""
    if TYPE_OF_SPECULATORS in fields.raw:
        return False
    known = ("dflash", "dspark")
    return any(kind in architectures(fields) for kind in known) or {"fc.weight", "hidden_norm.weight"} <= set(names)


FORMAT = CheckpointFormat(
    recognises=recognises,
    read=read,
    write_config=lambda config, target_name, _: hf_config(config, target_name),
    write_tensors=with_public_vocabulary,
    lists_layers=True,
    classes=CLASSES,
)
