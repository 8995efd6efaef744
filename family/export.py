"""Writing a decoder as a Hugging Face checkpoint: model.safetensors in bf16, config.json, generation_config.json."""

from collections.abc import Mapping
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from jspec.checkpoints.export import save_weights, to_tensors, write_json
from jspec.checkpoints.hf_config import sizes
from jspec.checkpoints.names import tensor_table
from jspec.config import ModelConfig


def to_hugging_face(config: ModelConfig, params: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Params (dotted names) under their Hugging Face names, the stacked ones parted."""
    return to_tensors(tensor_table(config), params)


def hugging_face_config(config: ModelConfig) -> dict:
    """``config.json`` of a Llama checkpoint with a tied head, in the spelling that old and new readers share."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes(config),
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
    named = {name: w.astype(ml_dtypes.bfloat16) for name, w in to_hugging_face(config, params).items()}
    save_weights(folder / "model.safetensors", named)
    write_json(folder / "config.json", hugging_face_config(config))
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_ids[0]}
    write_json(folder / "generation_config.json", {**ids, "do_sample": True, "temperature": 0.8, "top_p": 0.95})
