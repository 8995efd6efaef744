"""EAGLE-3 heads (Li et al., 2025) and P-EAGLE heads (2026): tensors ``midlayer.*`` or ``layers.0.*``, ``fc``, ``norm``.

Every public layout has the same tensors, but keeps the settings under different keys of config.json. ``read`` is for the
native layouts: the authors', SpecForge's, NVIDIA Model Optimizer's, NeMo Automodel's and DeepSpec's. The speculators format
is read by ``jspec.checkpoints.layouts.speculators``, which calls ``build`` of this file."""

import dataclasses
import os
import re
import warnings
from collections.abc import Collection, Iterable

import numpy as np

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.layouts.aux_layers import aux_ids_key, given_aux_layers, said_convention
from jspec.checkpoints.layouts.eagle3_settings import (
    MASK,
    NEMO,
    NORM,
    NORM_KEY,
    FinalNorm,
    Settings,
    final_norm,
    norm_meaning,
)
from jspec.checkpoints.layouts.format import CheckpointFormat, architectures, refuse_gemma
from jspec.checkpoints.layouts.layers import has_tensor, num_numbered_layers, read_layers, without_layers_of_target
from jspec.checkpoints.layouts.options import HeadOptions
from jspec.checkpoints.layouts.vocabulary import D2T, T2D, with_draft_ids, with_public_vocabulary
from jspec.checkpoints.tensors.layout import Layout, reshaped
from jspec.checkpoints.tensors.names import OUTPUT_HEAD, Placement, renamed, tensor_table
from jspec.config.heads import EMBEDDING, Eagle3Config

CLASSES = ("LlamaForCausalLMEagle3", NEMO, "Qwen3Eagle3Model", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM")
CLASSES += tuple(
    f"Eagle3{name}ForCausalLM" for name in ("Llama", "Qwen3", "Qwen2_5vl", "Qwen3vl", "MiniMaxM2", "DeepseekV2")
)
OLD_AUX_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")

# What Model Optimizer writes over the plain rotary embedding of a head; where it trained one with YaRN, rope_theta is there.
_WRITTEN_OVER = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}

# Settings that change what a draft head computes, each with the only value that is supported.
_FIXED: tuple[tuple[str, float | bool], ...] = (
    ("logit_scale", 1),
    ("use_input_layernorm_in_first_layer", True),
    ("use_mtp_layernorm", False),
    ("parallel_draft_step", 1),
    ("next_layer_regular", True),  # layers behind the first, which read no embeddings
    ("additional_fc", False),  # of SpecForge
)


def read(fields: Fields, tensors: dict[str, Tensor], options: HeadOptions) -> Layout:
    """The ``Layout`` of a folder in a native layout.

    Raises:
      Refusal: config.json and the tensors contradict each other, a setting is not supported, or config.json has a setting
        whose meaning ``options`` has to say and does not.
    """
    refuse_gemma(fields)
    fields = _with_trained_rope(fields)
    settings = Settings.of(fields, "eagle_config")
    aux_layers = given_aux_layers(settings, options.aux_convention)
    norm_output = norm_meaning(fields, settings.object_with(NORM_KEY), options.norm_output, tensors)
    norm = final_norm(settings, tensors, norm_output)
    parallel = "peagle" in str(fields.raw.get("architectures")).lower() or fields.flag("parallel_drafting")
    # The heads of vLLM's class for Qwen3-VL, ``Eagle3Qwen3vlForCausalLM``, have Llama's layers.
    qwen3 = re.search("Qwen3(?!vl)", str(fields.raw.get("architectures")))
    if qwen3 and not any("q_norm" in name for name in tensors):
        raise fields.refuse("architectures", "one without query and key norms, because the files hold none")
    layout = build(_layers(fields, tensors), settings, tensors, aux_layers, norm, parallel, options.mask_token_id)
    convention = (options.aux_convention or said_convention(settings)) if aux_layers else None
    return dataclasses.replace(layout, aux_convention=convention, norm_output=norm_output)


def _with_trained_rope(fields: Fields) -> Fields:
    """config.json with the rotary embedding that the head was trained with, where it shows what was written over it."""
    inner = fields.raw.get("eagle_config")
    is_of_tool = isinstance(inner, dict) and "use_mtp_layernorm" in inner
    if fields.raw.get("rope_scaling") != _WRITTEN_OVER or not is_of_tool:
        return fields
    warnings.warn(
        f"{fields.where}: Model Optimizer trained this head with a plain rotary embedding and wrote YaRN over it, by which "
        "the drafts are others; the plain one is read. To have YaRN, put rope_theta into rope_scaling",
        stacklevel=2,
    )
    return dataclasses.replace(fields, raw={**fields.raw, "rope_scaling": None})


def _layers(fields: Fields, tensors: Iterable[str]) -> Fields:
    """The config of the draft head's layers, with the number of layers that the files hold.

    NeMo Automodel writes the target's whole config there, with the target's number of layers and its windows. It builds
    one layer, or several for P-EAGLE, without windows, so the tensors decide."""
    count = max(num_numbered_layers(tensors), 1)
    if NEMO in str(fields.raw.get("architectures")):
        return without_layers_of_target(fields, count)
    if fields.integer("num_hidden_layers") > count:
        raise fields.refuse("num_hidden_layers", f"{count}, as many layers as the files hold tensors of")
    return fields


def build(
    fields: Fields,
    settings: Settings,
    tensors: dict[str, Tensor],
    aux_layers: tuple[int, ...] | None,
    norm: FinalNorm,
    parallel: bool,
    mask_token_id: int | None,
) -> Layout:
    """The ``Layout`` of an EAGLE-3 or P-EAGLE head.

    Args:
      fields: the config of its layers.
      settings: the other settings in config.json.
      tensors: name -> tensor, for every tensor in the files.
      aux_layers: the auxiliary hidden states that config.json lists, as ``given_aux_layers`` returns them.
      norm: which readers of the last layer's output read it normed.
      parallel: whether config.json says that the draft head drafts several positions in one pass, as P-EAGLE does.
      mask_token_id: the user's option, the token id of a P-EAGLE head's mask slots.

    Raises:
      Refusal: a setting is not supported, or config.json and the tensors contradict each other.
    """
    _require_supported(fields, settings, tensors)
    first = "midlayer." if any(name.startswith("midlayer.") for name in tensors) else "layers.0."
    layers = read_layers(fields, tensors, first, bias_key="attention_bias")
    target_size = settings.integer("target_hidden_size", layers.hidden_size)
    num_aux_layers = _num_aux_layers(settings, tensors, target_size, aux_layers)
    old = f"{OLD_AUX_NORMS[0]}.weight" in tensors
    norm_key, aux_norm = ("use_aux_norm", OLD_AUX_NORMS[0]) if old else ("fc_norm", "fc_norm.0")
    mask = MASK in tensors
    if mask_token_id is not None and not mask:
        raise Refusal(f"{fields.where}: mask_token_id={mask_token_id!r} is for P-EAGLE heads, and this is none")
    if parallel and not mask:
        raise Refusal(f"{fields.where}: says that the draft head drafts in parallel, but tensor {MASK!r} is missing")
    config = Eagle3Config(
        layers=layers,
        draft_vocab_size=_draft_vocab_size(settings, tensors, layers.vocab_size),
        target_hidden_size=target_size,
        num_aux_layers=num_aux_layers,
        aux_layers=aux_layers if num_aux_layers else None,
        norm_before_fuse=has_tensor(settings, "norm_before_fc", "input_norm.weight", tensors),
        norm_each_aux=has_tensor(settings, norm_key, f"{aux_norm}.weight", tensors),
        norm_before_residual=settings.object_with("norm_before_residual").flag("norm_before_residual"),
        norm_output=norm.recycled,
        norm_before_head=norm.before_head,
        fuse_bias=_fuse_bias(settings, tensors),
        own_embedding=EMBEDDING in tensors,
        own_head=OUTPUT_HEAD in tensors,
        mask_token_id=settings.mask_token(layers.vocab_size, mask_token_id) if mask else None,
    )
    label = "P-EAGLE head" if mask else "EAGLE-3 head"
    return Layout(
        config,
        label,
        table(config, first, old),
        _converted(os.path.dirname(fields.where), config, tensors),
        left_out=frozenset((D2T, T2D, NORM)),
    )


def table(config: Eagle3Config, first: str = "layers.0.", old_aux_norms: bool = False) -> dict[str, Placement]:
    """Tensor name -> where it goes among the parameters.

    Args:
      config: the config of the draft head.
      first: prefix of the first layer's tensors, ``layers.0.`` or ``midlayer.``.
      old_aux_norms: whether the norms of the auxiliary hidden states have the names that old versions of SGLang gave
        them, as in ``aux_norm_low.weight`` for ``fc_norm.0.weight``.
    """
    norms = {f"fc_norm.{i}.": f"{name}." for i, name in enumerate(OLD_AUX_NORMS)} if old_aux_norms else {}
    return renamed(tensor_table(config), {"layers.0.": first, **norms})


def _require_supported(fields: Fields, settings: Settings, tensors: dict[str, Tensor]):
    settings.require_fixed(_FIXED)
    if fields.raw.get("kv_lora_rank") is not None or any("kv_a_proj" in name for name in tensors):
        raise Refusal(
            f"{fields.where}: the draft head has latent attention (MLA, kv_lora_rank), which is not supported"
        )


def _num_aux_layers(
    settings: Settings, tensors: dict[str, Tensor], target_size: int, aux_layers: tuple[int, ...] | None
) -> int:
    """The number of auxiliary hidden states that ``fc`` fuses; 0 if the draft head reads the final hidden state instead.

    The width of ``fc.weight``, ``[D, count * target_size]``, decides."""
    top, key = settings.objects[-1], "use_aux_hidden_state"
    if not settings.object_with(key).flag(key, True):
        return 0
    if "fc.weight" not in tensors or len(tensors["fc.weight"].shape) != 2:
        raise Refusal(f"{top.where}: tensor 'fc.weight' is missing, and only {key}=false does without it")
    width = tensors["fc.weight"].shape[1]
    if not width or width % target_size:
        raise Refusal(
            f"{top.where}: tensor 'fc.weight' reads {width} numbers, expected a multiple of the target's hidden size, "
            f"{target_size}"
        )
    count = width // target_size
    if aux_layers is not None and len(aux_layers) != count:
        expected = f"{count} different layer ids, because 'fc.weight' fuses {count} hidden states"
        raise settings.refuse(aux_ids_key(settings), expected)
    settings.only("num_aux_hidden_states", count, "as 'fc.weight' has")
    return count


def _fuse_bias(settings: Settings, tensors: Iterable[str]) -> bool:
    """Whether ``fc`` has a bias, which is so if the files hold one.

    A key ``bias: true`` without the tensor is accepted: it is left over from an EAGLE config, and the authors' EAGLE-3
    class does not read it."""
    holder, present = settings.object_with("bias"), "fc.bias" in tensors
    if present:
        holder.only("bias", True, "because tensor 'fc.bias' is there")
    return present


def _draft_vocab_size(settings: Settings, tensors: dict[str, Tensor], vocab_size: int) -> int:
    """The size Vd of the draft vocabulary: the number of output channels of the draft head's own output head.

    A draft head that uses the target's output head has the target's vocabulary, unless config.json says otherwise."""
    key, weight = "draft_vocab_size", tensors.get(OUTPUT_HEAD)
    Vd = settings.integer(key, vocab_size) if weight is None else weight.shape[0]
    settings.only(key, Vd, f"the output channels of {OUTPUT_HEAD}")
    if Vd > vocab_size:
        raise settings.refuse(key, f"at most {vocab_size}, the target's vocabulary")
    return Vd


def _converted(folder: str, config: Eagle3Config, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """``tensors``, in which ``d2t`` is replaced by ``draft_ids`` and ``mask_hidden`` has the shape of its parameter."""
    replaced = with_draft_ids(folder, tensors, config.draft_vocab_size, config.layers.vocab_size)
    if MASK in tensors:
        replaced[MASK] = reshaped(tensors[MASK], config.feature_size)
    return replaced


def _recognises(fields: Fields, names: Collection[str]) -> bool:
    if any(kind in architectures(fields) for kind in ("eagle3", "peagle")):
        return True
    return "layers.0.hidden_norm.weight" in names or any(name.startswith("midlayer.") for name in names)


def public_tensors(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """``tensors`` (public name -> array) in the form of the public layouts, the inverse of ``_converted``.

    The array under ``d2t`` is ``draft_ids``, int32 ``[V]``; it becomes ``d2t`` and ``t2d``. ``mask_hidden``, ``[E]``,
    becomes ``[1, 1, E]``."""
    public = with_public_vocabulary(tensors)
    if MASK in tensors:
        public[MASK] = tensors[MASK].reshape(1, 1, -1)
    return public


FORMAT = CheckpointFormat(
    recognises=_recognises,
    read=lambda _, fields, tensors, options: read(fields, tensors, options),
    lists_layers=True,
    classes=CLASSES,
    names_target=True,
)
