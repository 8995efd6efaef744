"""EAGLE, EAGLE-3 and P-EAGLE heads in the format of the ``speculators`` package, whose config.json names the target.

The key ``speculators_model_type`` says which method it is. The type ``eagle`` (EAGLE, and HASS if ``fusion_fc`` has a
bias) was part of the format up to version 0.3. The object ``transformer_layer_config`` describes the layers; it leaves
out every value that is the default of the transformers class of its ``model_type``.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jspec._validation import require
from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.layouts import eagle, eagle3
from jspec.checkpoints.layouts.aux_layers import IDS, given_aux_layers
from jspec.checkpoints.layouts.eagle3_settings import MASK, Settings, final_norm
from jspec.checkpoints.layouts.format import CheckpointFormat
from jspec.checkpoints.layouts.layers import has_tensor, layer_fields, read_layers, window_fields
from jspec.checkpoints.layouts.options import HeadOptions
from jspec.checkpoints.tensors.layout import Layout
from jspec.config import ModelConfig
from jspec.config.heads import Eagle3Config

OWN_KINDS = ("eagle3", "peagle", "eagle")
BLOCK_KINDS = ("dflash", "dflash2", "dspark", "xpress")  # which ``jspec.checkpoints.layouts.block_speculators`` reads
MTP = "mtp"  # which ``jspec.checkpoints.layouts.mtp_speculators`` reads
KINDS = (*OWN_KINDS, *BLOCK_KINDS, MTP)
VERSION = "0.5.0"  # the version of the format that ``hf_config`` writes
TYPE, LAYERS, CONFIG = "speculators_model_type", "transformer_layer_config", "speculators_config"

_LAYER = "LlamaDecoderLayer"  # which the type ``eagle`` names beside its own class

_SHARED = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-6}
CLASS_DEFAULTS = {
    "llama": {**_SHARED, "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 2048},
    "qwen2": {**_SHARED, "intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768},
    "qwen3": {**_SHARED, "intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768},
}


def read(fields: Fields, tensors: dict[str, Tensor], options: HeadOptions) -> Layout:
    """The ``Layout`` of a folder in the speculators format.

    Raises:
      Refusal: an option contradicts what the format says, config.json and the tensors contradict each other, or the
        type is not supported.
    """
    kind = fields.raw.get(TYPE)
    if kind not in OWN_KINDS:
        raise fields.refuse(TYPE, f"one of {', '.join(KINDS)}; other kinds of speculators are not supported")
    if kind == "eagle":
        options.refuse_any(fields.where, ("aux_convention", "norm_output"), "EAGLE-3 heads")
        options.refuse_any(fields.where, ("mask_token_id",), "P-EAGLE heads")
        return _eagle(fields, tensors)
    if options.aux_convention not in (None, "input_of"):
        raise Refusal(
            f"{fields.where}: aux_convention={options.aux_convention!r}: the speculators format means the inputs of the "
            f"layers in {IDS}; expected 'input_of' or nothing"
        )
    refuse_norm_before_head(fields, options)
    if kind == "eagle3" and fields.raw.get("norm_before_residual") is None:
        raise Refusal(
            f"{fields.where}: norm_before_residual is missing, and readers of this format disagree on what that means; "
            "set it to what the draft head was trained with, true or false"
        )
    if kind == "eagle3" and MASK in tensors:
        raise fields.refuse(TYPE, f"'peagle', because tensor {MASK!r} is there")
    settings = Settings.of(fields)
    layout = eagle3.build(
        layers_of(fields, tensors),
        settings,
        tensors,
        given_aux_layers(settings, "input_of"),
        final_norm(settings, tensors, "recycled"),
        parallel=kind == "peagle",
        mask_token_id=options.mask_token_id,
    )
    config = dataclasses.replace(layout.config, trained_drafts=trained_drafts(fields))
    return dataclasses.replace(
        layout,
        config=config,
        label=f"{layout.label} (speculators format)",
        aux_convention="input_of",
        norm_output="recycled",
    )


def refuse_norm_before_head(fields: Fields, options: HeadOptions):
    """Raise a ``Refusal`` if the user says that what is fed back is not normed, against what the format means."""
    if options.norm_output not in (None, "recycled"):
        raise Refusal(
            f"{fields.where}: norm_output={options.norm_output!r}: the speculators format means that the normed output is "
            "fed back; expected 'recycled' or nothing"
        )


def _eagle(fields: Fields, tensors: dict[str, Tensor]) -> Layout:
    """The ``Layout`` of the type ``eagle``, which has the tensors of SafeAILab's layout under other names."""
    if fields.flag("layernorms"):
        raise fields.refuse(
            "layernorms",
            "false: with norms around the layer, the format does not say whether a normed state is fed back",
        )
    fields.only("transformer_layer_architecture", _LAYER)
    native = {_native_name(name): tensor for name, tensor in tensors.items()}
    layers = layers_of(fields, native, absent="llama")
    layers = dataclasses.replace(layers, raw={**layers.raw, "num_hidden_layers": 1})  # this type has one layer
    layout = eagle.build(
        read_layers(layers, native, "layers.0.", bias_key="attention_bias"),
        has_tensor(fields, "fusion_bias", "fc.bias", native),
        native,
    )
    return dataclasses.replace(layout, label=f"{layout.label} (speculators format)")


def _native_name(name: str) -> str:
    """The name in SafeAILab's layout: ``fusion_fc.weight`` becomes ``fc.weight``."""
    for theirs, native in (("fusion_fc.", "fc."), ("transformer.", "layers.0.")):
        if name.startswith(theirs):
            return native + name.removeprefix(theirs)
    return name


def hf_config(config: Eagle3Config, target_name: str, target_architectures: Sequence[str]) -> dict[str, Any]:
    """The config.json of an EAGLE-3 or P-EAGLE head.

    vLLM reads from it which target the draft head is for and how many tokens to draft.

    Raises:
      ValueError: the format cannot state ``config``.
    """
    expected = "at least 1, because the speculators format always has an fc"
    require(config.num_aux_layers > 0, "num_aux_layers", 0, expected)
    require(not config.fuse_bias, "fuse_bias", True, "False, because the speculators format has no bias of the fc")
    expected = "True, because the speculators format always has a norm before the output head"
    require(config.norm_before_head, "norm_before_head", False, expected)
    require(config.trained_drafts is not None, "trained_drafts", None, "a number, which the speculators format states")
    kind = "peagle" if config.method == "parallel" else "eagle3"
    return {
        "architectures": ["PEagleSpeculator" if kind == "peagle" else "Eagle3Speculator"],
        TYPE: kind,
        "speculators_version": VERSION,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fuse,
        "fc_norm": config.norm_each_aux,
        "norm_output": config.norm_output,
        IDS: None if config.aux_layers is None else list(config.aux_layers),
        **({"mask_token_id": config.mask_token_id} if kind == "peagle" else {}),
        "tie_word_embeddings": False,
        LAYERS: nested_layer_fields(config.layers),
        CONFIG: proposal_fields(kind, config.trained_drafts or 0, target_name, target_architectures),
    }


def proposal_fields(kind: str, drafts: int, target_name: str, target_architectures: Sequence[str]) -> dict[str, Any]:
    """The object ``speculators_config``: how many tokens to draft, and for which target."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": drafts}
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [{**proposal, "accept_tolerance": 0.0, "verifier_accept_k": 1}],
        "verifier": {"name_or_path": target_name, "architectures": list(target_architectures)},
    }


def nested_layer_fields(layers: ModelConfig) -> dict[str, Any]:
    written = {**layer_fields(layers), "attention_bias": layers.qkv_bias, **window_fields(layers)}
    if layers.qkv_bias and not layers.output_bias and not layers.qk_norm:
        written["model_type"] = "qwen2"  # the class with biases of query, key and value, and none of the output
    return written


def target_name(fields: Fields) -> str | None:
    """Name or path of the target that a draft head was trained for; None if config.json does not say."""
    outer = fields.nested(CONFIG)
    inner = outer.nested("verifier") if outer else None
    return inner.text("name_or_path", None) if inner else None


def nested_layers(fields: Fields) -> Fields:
    """``transformer_layer_config`` as it is."""
    layers = fields.nested(LAYERS)
    if layers is None:
        raise fields.refuse(LAYERS, "an object, the config of the layers")
    return layers


def layers_of(fields: Fields, tensors: dict[str, Tensor], absent: str | None = None) -> Fields:
    """``transformer_layer_config`` with the values that it leaves out filled in.

    Most come from ``CLASS_DEFAULTS``. An absent ``num_key_value_heads`` or ``head_dim`` stands for the class default in
    some files, and for a quotient such as hidden_size / num_attention_heads in others. So these two are computed from the
    shapes of the query and key projections, ``[N * H, ...]`` and ``[G * H, ...]``.

    Args:
      fields: config.json.
      tensors: name -> tensor, for every tensor in the files.
      absent: the ``model_type`` to assume if there is none; None if it has to be there.
    """
    layers = nested_layers(fields)
    kind = layers.text("model_type", absent) if absent else layers.text("model_type")
    if kind not in CLASS_DEFAULTS:
        raise layers.refuse("model_type", f"one of {', '.join(CLASS_DEFAULTS)}")
    values: dict[str, Any] = {**CLASS_DEFAULTS[kind], **layers.raw}
    query, key = (tensors.get(f"layers.0.self_attn.{name}_proj.weight") for name in "qk")
    heads = dataclasses.replace(layers, raw=values).integer("num_attention_heads")
    if values.get("head_dim") is None and query is not None:
        values["head_dim"] = query.shape[0] // heads or None
    width = values.get("head_dim")
    if values.get("num_key_value_heads") is None and key is not None and isinstance(width, int) and width > 0:
        values["num_key_value_heads"] = key.shape[0] // width or None
    return dataclasses.replace(layers, raw=values)


def trained_drafts(fields: Fields) -> int | None:
    """The number of drafts in a round that config.json recommends, its ``speculative_tokens``; None if it lacks one."""
    outer = fields.nested(CONFIG)
    methods = outer.raw.get("proposal_methods") if outer else None
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    return Fields(first, fields.where, f"{CONFIG}.proposal_methods.", fields.asked).integer("speculative_tokens", None)


FORMAT = CheckpointFormat(
    recognises=lambda fields, _: TYPE in fields.raw and fields.raw[TYPE] != MTP,
    read=lambda _, fields, tensors, options: read(fields, tensors, options),
    write_config=hf_config,
    write_tensors=eagle3.public_tensors,
    lists_layers=True,
    classes=("Eagle3Speculator", "Eagle3DraftModel", "PEagleSpeculator", "PEagleDraftModel", "EagleSpeculator", _LAYER),
    name="speculators",
)
