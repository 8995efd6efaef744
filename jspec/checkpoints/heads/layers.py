"""What the layouts of draft heads share: their decoder layers, and flags that tensors decide."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jspec._arguments import require
from jspec.checkpoints.fields import Fields
from jspec.checkpoints.hf_config import listed_windows, model_config, sizes
from jspec.checkpoints.refusal import Refusal
from jspec.checkpoints.tensor import Tensor
from jspec.config import ModelConfig

OUTPUT_HEAD = "lm_head.weight"

# What the target decides, and a head's config only repeats.
_TARGETS_OWN = ("bos_token_id", "eos_token_id", "tie_word_embeddings")

# Read by ``_windows`` instead, because a head may slide whatever its class.
_WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

# The transformers class whose defaults complete a head's config; any other type of model takes Llama's.
_CLASSES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def by_presence(fields: Fields, key: str, tensor: str, tensors: Iterable[str]) -> bool:
    """Whether ``tensor`` is there; a ``Refusal`` if ``key`` of config.json says otherwise."""
    present = tensor in tensors
    if fields.flag(key, present) != present:
        state = "there" if present else "missing"
        raise fields.refuse(key, f"{str(present).lower()}, because tensor {tensor!r} is {state}")
    return present


def read_layers(fields: Fields, tensors: dict[str, Tensor], first: str, bias_key: str) -> ModelConfig:
    """The decoder layers of a head: sizes from its config.json, biases and query norms from its tensors.

    Args:
      fields: the config of the layers.
      tensors: what the files hold.
      first: prefix of the first layer's tensors.
      bias_key: the key that says whether query, key and value have biases.
    """
    family = _CLASSES.get(str(fields.raw.get("model_type")), "LlamaForCausalLM")
    own = {key: value for key, value in fields.raw.items() if key not in (*_TARGETS_OWN, *_WINDOWS)}
    try:
        config = model_config(dataclasses.replace(fields, raw=own), family)
        qk_norm = f"{first}self_attn.q_norm.weight" in tensors
        return dataclasses.replace(
            config,
            architecture="Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM",
            qk_norm=qk_norm,
            qkv_bias=by_presence(fields, bias_key, f"{first}self_attn.q_proj.bias", tensors),
            output_bias=f"{first}self_attn.o_proj.bias" in tensors,
            mlp_bias=by_presence(fields, "mlp_bias", f"{first}mlp.gate_proj.bias", tensors),
            windows=_windows(fields, config.num_layers),
        )
    except Refusal:
        raise
    except ValueError as error:
        raise Refusal(f"{fields.where}: {error}") from None


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """The window of each layer. ``sliding_window`` alone means nothing: configs copied from a target's keep it."""
    window, kinds = fields.integer("sliding_window", None), fields.raw.get("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers", 28, low=0)
        slides = fields.flag("use_sliding_window") and window is not None
        return tuple(window if slides and layer >= first else None for layer in range(layers))
    return listed_windows(fields, window, layers)


def layer_fields(config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json that ``read_layers`` reads, biases of the attention and windows left out."""
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",
        **sizes(config),
        "mlp_bias": config.mlp_bias,
    }


def require_no_windows(config: ModelConfig):
    """Raise unless every layer sees all that came before, in a layout that has no place for a window."""
    require(not any(config.windows), "windows", config.windows, "None for each layer, as in every head of this layout")


def window_fields(config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json that say which layers slide: none if none does."""
    widths = {window for window in config.windows if window is not None}
    if not widths:
        return {}
    require(len(widths) == 1, "windows", config.windows, "one width for all layers that have a window")
    kinds = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
    return {"sliding_window": widths.pop(), "layer_types": kinds, "use_sliding_window": True}
