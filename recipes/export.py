"""Writes a decoder as a Hugging Face checkpoint: model.safetensors in bf16, config.json, generation_config.json."""

from collections.abc import Mapping
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from jspec.checkpoints.export import save_weights, to_tensors, write_json
from jspec.checkpoints.huggingface.config import sizes
from jspec.checkpoints.tensors.names import tensor_table
from jspec.config import ModelConfig


def to_hugging_face(config: ModelConfig, params: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """The tensors of a Hugging Face checkpoint, by their names there.

    jspec stacks some matrices into one parameter (queries, keys and values, for example); here they are split again.

    Args:
      config: the model.
      params: its parameters under dotted names.
    """
    return to_tensors(tensor_table(config), params)


def hugging_face_config(config: ModelConfig) -> dict:
    """The content of ``config.json`` for a Llama model with tied embeddings.

    It uses the field names that old and new versions of transformers both read.
    """
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
    """Write the weights in bf16, config.json and generation_config.json; the caller adds the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {name: w.astype(ml_dtypes.bfloat16) for name, w in to_hugging_face(config, params).items()}
    save_weights(folder / "model.safetensors", named)
    write_json(folder / "config.json", hugging_face_config(config))
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_ids[0]}
    write_json(folder / "generation_config.json", {**ids, "do_sample": True, "temperature": 0.8, "top_p": 0.95})
