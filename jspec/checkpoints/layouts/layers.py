"""Reads and writes the config of the decoder layers of EAGLE heads, which several layouts share."""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from jspec._validation import require
from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.huggingface.config import model_config, sizes
from jspec.checkpoints.huggingface.rope import KEYS, as_of_text
from jspec.checkpoints.huggingface.windows import from_a_layer_on, listed_windows
from jspec.checkpoints.layouts.eagle3_settings import Settings
from jspec.config import ModelConfig
from jspec.config.heads import EagleConfig, MedusaConfig, MLPConfig, MTPConfig

# Keys that the target decides; the config of a draft head only repeats them.
_DECIDED_BY_TARGET = ("bos_token_id", "eos_token_id", "tie_word_embeddings")

# Keys that ``_windows`` reads instead of ``model_config``, because in a draft head they do not depend on the class.
_WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

_NUMBERED = re.compile(r"layers\.(\d{1,4})\.")

# model_type -> the transformers class whose defaults stand for absent keys. Any other model_type takes Llama's.
_CLASSES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def without_layers_of_target(fields: Fields, count: int) -> Fields:
    """config.json with ``count`` layers and no windows, for heads whose tool copies the target's, which are others there."""
    own = {key: value for key, value in fields.raw.items() if key not in _WINDOWS}
    return dataclasses.replace(fields, raw={**own, "num_hidden_layers": count})


def has_tensor(fields: Fields | Settings, key: str, tensor: str, tensors: Iterable[str]) -> bool:
    """Whether ``tensor`` is among ``tensors``, after a check that config.json does not say otherwise.

    Example: ``has_tensor(fields, "bias", "fc.bias", tensors)`` is True if the files hold ``fc.bias``, and config.json
    has ``"bias": true`` or no such key.

    Raises:
      Refusal: the flag ``key`` of config.json contradicts the files.
    """
    present = tensor in tensors
    fields.only(key, present, f"because tensor {tensor!r} is {'there' if present else 'missing'}")
    return present


def num_numbered_layers(tensors: Iterable[str]) -> int:
    """How many layers there are tensors of, by the highest number in names such as ``layers.0.mlp.up_proj.weight``."""
    return 1 + max((int(match[1]) for match in map(_NUMBERED.match, tensors) if match), default=-1)


def read_layers(fields: Fields, tensors: dict[str, Tensor], first: str, bias_key: str) -> ModelConfig:
    """The config of a draft head's decoder layers.

    The sizes come from config.json. Whether there are biases, and norms of query and key, is read from the tensors.

    Args:
      fields: the config of the layers.
      tensors: name -> tensor, for every tensor in the files.
      first: prefix of the first layer's tensors, for example ``midlayer.``.
      bias_key: the key of config.json that says whether query, key and value have biases.

    Raises:
      Refusal: a size is missing or absurd, or config.json contradicts the tensors.
    """
    family = _CLASSES.get(str(fields.raw.get("model_type")), "LlamaForCausalLM")
    own = {key: value for key, value in fields.raw.items() if key not in (*_DECIDED_BY_TARGET, *_WINDOWS)}
    own |= {key: _for_text(fields, key) for key in KEYS if key in own}
    try:
        config = model_config(dataclasses.replace(fields, raw=own), family)
        if config.activation != "silu":
            raise fields.refuse("hidden_act", "'silu' (alias 'swish'), the activation of every draft head")
        qk_norm = f"{first}self_attn.q_norm.weight" in tensors
        return dataclasses.replace(
            config,
            architecture="Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM",
            qk_norm=qk_norm,
            qkv_bias=has_tensor(fields, bias_key, f"{first}self_attn.q_proj.bias", tensors),
            output_bias=f"{first}self_attn.o_proj.bias" in tensors,
            mlp_bias=has_tensor(fields, "mlp_bias", f"{first}mlp.gate_proj.bias", tensors),
            windows=_windows(fields, config.num_layers),
        )
    except Refusal:
        raise
    except ValueError as error:
        raise Refusal(f"{fields.where}: {error}") from None


def _for_text(fields: Fields, key: str) -> Any:
    """The rope under ``key`` as it is for text; the heads of Qwen-VL models repeat that of their model, ``mrope``."""
    scaling = fields.nested(key)
    if scaling is None:
        return fields.raw[key]
    scaling.flag("mrope_interleaved")
    if scaling.raw.get("mrope_section") is not None:
        scaling.numbers("mrope_section")
    return as_of_text(scaling)


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """The attention window of each layer, in tokens; None for full attention.

    ``sliding_window`` alone does not make a layer slide, because configs that were copied from a target's still have
    that key: ``layer_types`` or ``use_sliding_window`` has to say so too."""
    window, kinds = fields.integer("sliding_window", None), fields.raw.get("layer_types")
    if kinds is None:
        slides = fields.flag("use_sliding_window") and window is not None
        return tuple(window if slides and late else None for late in from_a_layer_on(fields, layers))
    return listed_windows(fields, window, layers)


def layer_fields(config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json that ``read_layers`` reads, without those of attention biases and windows."""
    return {"model_type": "qwen3" if config.qk_norm else "llama", **sizes(config), "mlp_bias": config.mlp_bias}


def require_no_windows(config: ModelConfig):
    """Raise a ``ValueError`` if a layer has an attention window; for layouts whose config.json cannot state one."""
    expected = "None for each layer, as in every draft head of this layout"
    require(not any(config.windows), "windows", config.windows, expected)


def refuse_draft_vocabulary(config: EagleConfig | MedusaConfig | MLPConfig | MTPConfig):
    """Raise a ``ValueError`` if a draft head has a draft vocabulary; for layouts whose config.json cannot state one."""
    size = config.draft_vocab_size
    require(size is None, "draft_vocab_size", size, "None, as this layout has all tokens")


def window_fields(config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json that say which layers have an attention window; empty if none has."""
    widths = {window for window in config.windows if window is not None}
    if not widths:
        return {}
    require(len(widths) == 1, "windows", config.windows, "one width for all layers that have a window")
    kinds = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
    return {"sliding_window": widths.pop(), "layer_types": kinds, "use_sliding_window": True}
