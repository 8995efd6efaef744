"""Writing a decoder as a Hugging Face checkpoint: model.safetensors in bf16, config.json, generation_config.json."""

import json
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from safetensors.flax import save_file

from convert.names import tensor_table
from jspec.config import ModelConfig


def to_hugging_face(config: ModelConfig, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Params (dotted names) under their Hugging Face names, the stacked ones parted."""
    table = tensor_table(config)
    return {name: params[param][start : start + shape[0]] for name, (param, start, shape) in table.items()}


def hugging_face_config(config: ModelConfig) -> dict:
    """``config.json`` of a Llama checkpoint with a tied head, in the spelling that old and new readers share."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
        "rope_theta": config.rope.theta,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0],
        "torch_dtype": "bfloat16",
    }


def save_checkpoint(folder: Path, config: ModelConfig, params: Mapping[str, jax.Array]) -> None:
    """Write weights, in bf16, and both configs into ``folder``; tokenizer files are the caller's to add."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {name: w.astype(jnp.bfloat16) for name, w in to_hugging_face(config, params).items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", hugging_face_config(config))
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_ids[0]}
    _write_json(folder / "generation_config.json", {**ids, "do_sample": True, "temperature": 0.8, "top_p": 0.95})


def _write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
