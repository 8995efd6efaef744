"""Reads config.json and generation_config.json of a Hugging Face folder as a ``ModelConfig``.

An absent key takes the default of its transformers class, so that transformers and jspec read the same model.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jspec.checkpoints.fields import Fields
from jspec.checkpoints.folder import Folder
from jspec.checkpoints.hf_rope import read_rope, write_rope
from jspec.checkpoints.refusal import Refusal
from jspec.config import ModelConfig
from jspec.heads import HeadConfig

# No dense decoder exceeds these. They bound the work that a hostile config can cause.
MAX_LAYERS = 4096
MAX_PARAMETERS = 2**44


@dataclasses.dataclass(frozen=True)
class Family:
    """The defaults of a transformers class, and what the class fixes whatever config.json says.

    Attributes:
      max_position, num_kv_heads, head_dim, sliding_window: defaults for absent keys. If ``num_kv_heads`` is None, there
        are as many KV heads as attention heads. If ``head_dim`` is None, it is hidden_size / num_attention_heads.
      windows: which layers have an attention window. ``none``: no layer. ``all``: every layer, if config.json has a
        window. ``listed``: the layers in ``layer_types``, or without that key the layers from ``max_window_layers`` on;
        only if ``use_sliding_window`` is set.
      biases: which attention projections have biases. ``none``, ``qkv``, or ``configured``: all four if the key
        ``attention_bias`` is true.
      qk_norm: whether queries and keys are normed.
    """

    max_position: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    sliding_window: int | None = None
    windows: Literal["none", "all", "listed"] = "none"
    biases: Literal["none", "qkv", "configured"] = "none"
    qk_norm: bool = False


FAMILIES = {
    "LlamaForCausalLM": Family(max_position=2048, biases="configured"),
    "MistralForCausalLM": Family(max_position=131072, num_kv_heads=8, sliding_window=4096, windows="all"),
    "Qwen2ForCausalLM": Family(
        max_position=32768, num_kv_heads=32, sliding_window=4096, windows="listed", biases="qkv"
    ),
    "Qwen3ForCausalLM": Family(
        max_position=32768,
        num_kv_heads=32,
        head_dim=128,
        sliding_window=4096,
        windows="listed",
        biases="configured",
        qk_norm=True,
    ),
}


def read_config(folder: Folder) -> ModelConfig:
    """The config of the language model in ``folder``, from its JSON files alone.

    Raises:
      Refusal: it asks for remote code, has quantised weights or an unknown architecture, or a field is missing or absurd.
    """
    return decoder_config(folder, read_fields(folder))


def read_fields(folder: Folder) -> Fields:
    """The fields of config.json, for checkpoints of every kind.

    The key ``auto_map``, which names Python code, is not refused here: ``decoder_config`` refuses it for language models.
    Draft heads may have it, because jspec reads nothing but their weights and knows what they compute.

    Raises:
      Refusal: the weights are quantised.
    """
    raw = folder.json("config.json")
    fields = Fields(raw, f"{folder.given}/config.json")
    for key in ("quantization_config", "compression_config"):
        if raw.get(key):
            method = raw[key].get("quant_method", "unnamed") if isinstance(raw[key], dict) else "unnamed"
            raise Refusal(f"{fields.where}: {key} says that the weights are quantised ({method}), not yet supported")
    return fields


def decoder_config(folder: Folder, fields: Fields) -> ModelConfig:
    """The causal language model that ``fields`` describes; see ``read_config``."""
    refuse_remote_code(folder, fields.raw)
    try:
        config = model_config(fields, _architecture(fields), _eos_token_ids(folder, fields))
    except Refusal:
        raise
    except ValueError as error:
        raise Refusal(f"{fields.where}: {error}") from None
    require_size(config, fields.where)
    return config


def require_size(config: ModelConfig | HeadConfig, where: str):
    """Raise a ``Refusal`` if ``config`` has more parameters than any model; ``where`` is the file, for the message."""
    if config.num_parameters > MAX_PARAMETERS:
        raise Refusal(f"{where}: its sizes multiply to {config.num_parameters} parameters, beyond any model")


def refuse_remote_code(folder: Folder, config: Mapping[str, Any]):
    """Raise a ``Refusal`` if config.json (``config``) or tokenizer_config.json names Python code to run (``auto_map``)."""
    tokenizer = folder.json("tokenizer_config.json") if folder.has("tokenizer_config.json") else {}
    for name, raw in (("config.json", config), ("tokenizer_config.json", tokenizer)):
        if raw.get("auto_map"):
            raise Refusal(
                f"{folder.given}/{name}: auto_map asks for remote code, which jspec never runs; "
                "use a checkpoint of a built-in architecture"
            )


def _architecture(fields: Fields) -> str:
    names = fields.raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise fields.refuse("architectures", f"one of {', '.join(FAMILIES)}")
    return name


def model_config(fields: Fields, architecture: str, eos_token_ids: tuple[int, ...] = ()) -> ModelConfig:
    """The ``ModelConfig`` that ``fields`` describe, with the defaults of the transformers class ``architecture``."""
    family = FAMILIES[architecture]
    _check_activation(fields)
    layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    max_position = fields.integer("max_position_embeddings", family.max_position)
    num_heads = fields.integer("num_attention_heads")
    bias = family.biases == "configured" and fields.flag("attention_bias")
    return ModelConfig(
        architecture=architecture,
        vocab_size=(vocab_size := fields.integer("vocab_size")),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=layers,
        num_heads=num_heads,
        num_kv_heads=_kv_heads(fields, family, num_heads),
        head_dim=_head_dim(fields, family, num_heads),
        max_position=max_position,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=read_rope(fields, max_position),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=bias or family.biases == "qkv",
        output_bias=bias,
        mlp_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        windows=_windows(fields, family, layers),
        bos_token_id=fields.integer("bos_token_id", None, low=0, high=vocab_size - 1),
        eos_token_ids=eos_token_ids,
    )


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


def _check_activation(fields: Fields):
    name = "hidden_activation" if fields.raw.get("hidden_activation") else "hidden_act"
    if fields.text(name, "silu") not in ("silu", "swish"):
        raise fields.refuse(name, "'silu' (alias 'swish')")


def _kv_heads(fields: Fields, family: Family, num_heads: int) -> int:
    absent = family.num_kv_heads if "num_key_value_heads" not in fields.raw else None
    heads = fields.integer("num_key_value_heads", absent or num_heads)
    if num_heads % heads:
        raise Refusal(
            f"{fields.where}: num_key_value_heads={heads}: expected a divisor of num_attention_heads, {num_heads}"
        )
    return heads


def _head_dim(fields: Fields, family: Family, num_heads: int) -> int:
    hidden = fields.integer("hidden_size")
    absent = family.head_dim if "head_dim" not in fields.raw else None
    head_dim = fields.integer("head_dim", absent or hidden // num_heads or None)
    if fields.raw.get("head_dim") is None and not absent and hidden % num_heads:
        raise Refusal(
            f"{fields.where}: hidden_size={hidden}: expected a multiple of num_attention_heads, {num_heads}, "
            "or an explicit head_dim"
        )
    return head_dim


def _windows(fields: Fields, family: Family, layers: int) -> tuple[int | None, ...]:
    window = fields.integer("sliding_window", None)
    if "sliding_window" not in fields.raw:
        window = family.sliding_window
    if family.windows == "none" or (family.windows == "listed" and not fields.flag("use_sliding_window")):
        window = None
    first = fields.integer("max_window_layers", 28, low=0) if family.windows == "listed" else 0
    derived = tuple(window if i >= first else None for i in range(layers))
    if fields.raw.get("layer_types") is None:
        return derived
    listed = listed_windows(fields, window, layers)
    if family.windows != "listed" and listed != derived:
        raise fields.refuse("layer_types", "the same attention in every layer, as this architecture has")
    return listed


def listed_windows(fields: Fields, window: int | None, layers: int) -> tuple[int | None, ...]:
    """The attention window of each layer, as the key ``layer_types`` lists them.

    Args:
      fields: the config; it has to have ``layer_types``.
      window: the window, in tokens, of each ``sliding_attention`` layer; None if config.json has none.
      layers: the number of layers.

    Returns:
      ``window`` for a ``sliding_attention`` layer, None for a ``full_attention`` layer.
    """
    kinds = fields.raw["layer_types"]
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != layers or not all(isinstance(k, str) and k in known for k in kinds):
        raise fields.refuse("layer_types", f"{layers} entries, each full_attention or sliding_attention")
    if window is None and "sliding_attention" in kinds:
        raise fields.refuse("layer_types", "a sliding_window for its sliding_attention layers, and its use switched on")
    return tuple(known[kind] for kind in kinds)


def _eos_token_ids(folder: Folder, fields: Fields) -> tuple[int, ...]:
    """The end-of-sequence tokens of config.json and generation_config.json together.

    Instruction-tuned checkpoints list their end-of-turn tokens in generation_config.json only."""
    sources = [fields]
    if folder.has("generation_config.json"):
        name = "generation_config.json"
        sources.append(Fields(folder.json(name), f"{folder.given}/{name}"))
    vocab_size = fields.integer("vocab_size")
    found: dict[int, None] = {}
    for source in sources:
        value = source.raw.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise source.refuse("eos_token_id", f"token ids in 0..{vocab_size - 1}")
            found[token] = None
    return tuple(found)
