"""Reads config.json and generation_config.json of a Hugging Face folder as a ``ModelConfig``.

An absent key takes the default of its transformers class, so that transformers and jspec read the same model.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tiktoken import refuse_tiktoken
from jspec.checkpoints.huggingface.families import FAMILIES, MODEL_TYPES, Family
from jspec.checkpoints.huggingface.multimodal import WRAPPERS, module_names, text_fields
from jspec.checkpoints.huggingface.older_files import with_older_file
from jspec.checkpoints.huggingface.rope import write_rope
from jspec.checkpoints.huggingface.unread_classes import why_not
from jspec.checkpoints.huggingface.windows import Windows, read_windows
from jspec.checkpoints.quantized.config import read_quantization
from jspec.checkpoints.quantized.format import StoredFormats
from jspec.checkpoints.quantized.mixed import Mixed
from jspec.checkpoints.quantized.model_optimizer import with_model_optimizer
from jspec.checkpoints.quantized.scales import with_stored_quantization
from jspec.config import OF_TARGET, ModelConfig
from jspec.config.heads import HeadConfig

# No dense decoder exceeds these. They bound the work that a hostile config can cause.
MAX_LAYERS = 4096
MAX_PARAMETERS = 2**44


# What config.json calls an activation -> what ``ModelConfig`` calls it.
ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
# Keys whose null says something else than their absence.
_NULLABLE = (
    *("num_key_value_heads", "head_dim", "sliding_window", "q_lora_rank"),
    *("attn_logit_softcapping", "final_logit_softcapping", "hidden_size_per_layer_input", "per_layer_config"),
)


def read_config(folder: Folder) -> ModelConfig:
    """The config of the language model in ``folder``, from its JSON files alone.

    Raises:
      Refusal: it asks for remote code, its weights are quantised in a way that is not read, its architecture is unknown,
        or a field is missing or absurd.
    """
    return decoder_config(folder, read_fields(folder))


def read_fields(folder: Folder) -> Fields:
    """The fields of config.json, for checkpoints of every kind.

    The key ``auto_map``, which names Python code, is not refused here: ``decoder_config`` refuses it for language models.
    Draft heads may have it, because jspec reads nothing but their weights and knows what they compute.

    Raises:
      Refusal: the weights are quantised in a way that is not read, or there is no config.json.
    """
    if not folder.has("config.json"):
        _refuse_adapter(folder)
    fields = with_model_optimizer(folder, Fields(folder.json("config.json"), f"{folder.given}/config.json"))
    fields = with_older_file(folder, fields)
    stored_quantization(fields)
    return fields


def _refuse_adapter(folder: Folder):
    """Raise a ``Refusal`` if the folder holds a LoRA adapter, as those that UNO drafts with are, and no model."""
    name = "adapter_config.json"
    if folder.has(name):
        raise Refusal(
            f"{folder.given}/{name}: this is a LoRA adapter, and adapters are not applied, those of UNO, which draft, among "
            "them; merge it into its base model (merge_and_unload of peft), and give the merged folder"
        )


def stored_quantization(fields: Fields) -> StoredFormats | None:
    """How the linear maps in the files are quantised, by config.json; None if they are not, or in the way that the
    family's own entry in ``FAMILIES`` reads.

    Raises:
      Refusal: they are quantised in a way that is not read.
    """
    family = FAMILIES.get(_first_architecture(fields))
    stored = read_quantization(fields, () if family is None else family.reads_quantization)
    return dataclasses.replace(stored, called=module_names(fields)) if isinstance(stored, Mixed) else stored


def decoder_config(folder: Folder, fields: Fields) -> ModelConfig:
    """The causal language model that ``fields`` describes; see ``read_config``."""
    refuse_remote_code(folder, fields.raw, getattr(FAMILIES.get(_first_architecture(fields)), "own_code", False))
    stored, called = stored_quantization(fields), module_names(fields)
    try:
        fields = text_fields(fields)
        architecture = _architecture(fields)
        fields = with_defaults(fields, FAMILIES[architecture])
        config = model_config(fields, architecture, _eos_token_ids(folder, fields))
    except Refusal:
        raise
    except ValueError as error:
        raise Refusal(f"{fields.where}: {error}") from None
    require_size(config, fields.where)
    if any(config.layer(number).reads_cache_of == OF_TARGET for number in range(config.num_layers)):
        raise fields.refuse(
            "num_kv_shared_layers", f"fewer than the {config.num_layers} layers, as no layer would have keys and values"
        )
    return config if stored is None else with_stored_quantization(config, stored, called)


def require_size(config: ModelConfig | HeadConfig, where: str):
    """Raise a ``Refusal`` if ``config`` has more parameters than any model; ``where`` is the file, for the message."""
    if config.num_parameters > MAX_PARAMETERS:
        raise Refusal(f"{where}: its sizes multiply to {config.num_parameters} parameters, beyond any model")


def refuse_remote_code(folder: Folder, config: Mapping[str, Any], own_code: bool):
    """Raise a ``Refusal`` if config.json or tokenizer_config.json names Python code to run (``auto_map``).

    Args:
      folder: the folder.
      config: its config.json.
      own_code: whether the family's checkpoints name code that is not needed. That of a tokenizer is not where there is a
        tokenizer.json.
    """
    refuse_tiktoken(folder)
    tokenizer = folder.json("tokenizer_config.json") if folder.has("tokenizer_config.json") else {}
    config = {} if own_code else config
    tokenizer = {} if own_code and folder.has("tokenizer.json") else tokenizer
    for name, raw in (("config.json", config), ("tokenizer_config.json", tokenizer)):
        if raw.get("auto_map"):
            raise Refusal(
                f"{folder.given}/{name}: auto_map asks for remote code, which jspec never runs; "
                "use a checkpoint of a built-in architecture"
            )


def _first_architecture(fields: Fields) -> str:
    """The transformers class that config.json names, or else the one that its ``model_type`` stands for in transformers;
    empty if it names none, or several."""
    names, model_type = fields.raw.get("architectures"), fields.raw.get("model_type")
    if names in (None, []):
        return MODEL_TYPES.get(model_type, "") if isinstance(model_type, str) else ""
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    return name if isinstance(name, str) else ""


def _architecture(fields: Fields) -> str:
    name, model_type = _first_architecture(fields), fields.raw.get("model_type")
    if name not in FAMILIES:
        shown = "model_type" if fields.raw.get("architectures") in (None, []) and model_type else "architectures"
        value, words = fields.raw.get(shown), why_not(name or _camel_case(model_type), (*FAMILIES, *WRAPPERS))
        raise Refusal(f"{fields.where}: {fields.prefix}{shown}={value!r}: {words}")
    other = MODEL_TYPES.get(model_type, name) if isinstance(model_type, str) else name
    if other != name:
        raise Refusal(
            f"{fields.where}: architectures={[name]} and model_type={model_type!r}, which transformers reads as {other}, "
            "contradict each other; correct the one that is wrong"
        )
    return name


def _camel_case(model_type: object) -> str:
    """The name of a class as transformers makes it of a ``model_type`` in most cases; empty if there is none."""
    if not isinstance(model_type, str):
        return ""
    return "".join(part[:1].upper() + part[1:] for part in model_type.split("_")) + "ForCausalLM"


def with_defaults(fields: Fields, family: Family) -> Fields:
    """``fields`` with the defaults of the transformers class for absent keys, and for keys that are null by mistake."""
    given = {key: value for key, value in fields.raw.items() if value is not None or key in _NULLABLE}
    return dataclasses.replace(fields, raw={**family.defaults, **given})


def model_config(fields: Fields, architecture: str, eos_token_ids: tuple[int, ...] = ()) -> ModelConfig:
    """The ``ModelConfig`` that ``fields`` describe, with the defaults of the transformers class ``architecture``."""
    family = FAMILIES[architecture]
    fields = with_defaults(fields, family)
    layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    max_position = fields.integer("max_position_embeddings")
    num_heads = fields.integer("num_attention_heads")
    bias = family.biases == "configured" and fields.flag("attention_bias")
    windows: Windows = (None,) * layers
    if not family.has_delta_nets:
        windows = read_windows(fields, layers, family.slides, family.window_switch, family.lists_windows)
    more = family.more(fields)
    read = {
        "vocab_size": (vocab_size := fields.integer("vocab_size")),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer(family.key("intermediate_size")),
        "num_layers": layers,
        "num_heads": num_heads,
        "num_kv_heads": more["num_kv_heads"] if "num_kv_heads" in more else _kv_heads(fields, num_heads),
        "head_dim": more["head_dim"] if "head_dim" in more else _head_dim(fields, num_heads),
        "max_position": max_position,
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        **family.ropes(fields, windows),
        "tie_embeddings": fields.flag("tie_word_embeddings"),
        "activation": _activation(fields, family.key("hidden_act")),
        "qkv_bias": bias or family.biases == "qkv",
        "output_bias": bias,
        "mlp_bias": family.mlp_bias and fields.flag("mlp_bias"),
        "windows": windows,
        "bos_token_id": fields.integer("bos_token_id", None, low=0, high=vocab_size - 1),
        "eos_token_ids": eos_token_ids,
    }
    return ModelConfig(architecture=architecture, **{**read, **family.choices, **more})


def sizes(config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json that state the sizes of a decoder and its rotary embedding."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        **write_rope(config.rope),
    }


def _activation(fields: Fields, key: str) -> str:
    name = fields.text(key, "silu")
    if name not in ACTIVATION_NAMES:
        raise fields.refuse(key, f"one of {', '.join(ACTIVATION_NAMES)}")
    return ACTIVATION_NAMES[name]


def _kv_heads(fields: Fields, num_heads: int) -> int:
    heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % heads:
        raise Refusal(
            f"{fields.where}: num_key_value_heads={heads}: expected a divisor of num_attention_heads, {num_heads}"
        )
    return heads


def _head_dim(fields: Fields, num_heads: int) -> int:
    hidden = fields.integer("hidden_size")
    if fields.raw.get("head_dim") is None and hidden % num_heads:
        raise Refusal(
            f"{fields.where}: hidden_size={hidden}: expected a multiple of num_attention_heads, {num_heads}, "
            "or an explicit head_dim"
        )
    return fields.integer("head_dim", hidden // num_heads or None)


def _eos_token_ids(folder: Folder, fields: Fields) -> tuple[int, ...]:
    """The end-of-sequence tokens of config.json and generation_config.json together.

    Instruction-tuned checkpoints list their end-of-turn tokens in generation_config.json only."""
    sources = [fields]
    if folder.has("generation_config.json"):
        name = "generation_config.json"
        sources.append(Fields(folder.json(name), f"{folder.given}/{name}"))
    vocab_size = fields.integer("vocab_size")
    tokens: dict[int, None] = {}
    for source in sources:
        value = source.raw.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise source.refuse("eos_token_id", f"token ids in 0..{vocab_size - 1}")
            tokens[token] = None
    return tuple(tokens)
