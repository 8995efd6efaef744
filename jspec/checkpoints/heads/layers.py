"""What the layouts of draft heads share: their decoder layers, and flags that tensors decide."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jspec._arguments import require
from jspec.checkpoints.fields import Fields
from jspec.checkpoints.hf_config import model_config, sizes
from jspec.checkpoints.refusal import Refusal
from jspec.checkpoints.tensor import Tensor
from jspec.config import ModelConfig

OUTPUT_HEAD = "lm_head.weight"

# What the target decides, and a head's config only repeats.
_TARGETS_OWN = ("bos_token_id", "eos_token_id", "tie_word_embeddings")


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
    family = "Qwen3ForCausalLM" if fields.raw.get("model_type") == "qwen3" else "LlamaForCausalLM"
    own = {key: value for key, value in fields.raw.items() if key not in _TARGETS_OWN}
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
        )
    except Refusal:
        raise
    except ValueError as error:
        raise Refusal(f"{fields.where}: {error}") from None


def layer_fields(config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json that ``read_layers`` reads, biases of the attention left out."""
    require(not any(config.windows), "windows", config.windows, "None for each layer of a head that is exported")
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",
        **sizes(config),
        "mlp_bias": config.mlp_bias,
    }
