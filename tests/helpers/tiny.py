"""Tiny random Hugging Face checkpoints, written without torch, and a tokenizer for them."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.huggingface.config import read_config
from jspec.checkpoints.huggingface.families import FAMILIES
from jspec.checkpoints.tensors.names import tensor_table
from jspec.checkpoints.tensors.parts import rearranged_tensors
from jspec.checkpoints.tensors.stacked_experts import file_shapes
from jspec.config import ModelConfig

ARCHITECTURES = tuple(FAMILIES)
LLAMA = ModelConfig(
    "LlamaForCausalLM", 29, 16, 24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4, max_position=64
)
SMALL = {"max_batch": 2, "max_len": 64, "page_size": 16, "prefill_chunk": 16}  # options of ``jspec.load``
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENTS = {"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 16}
_SLIDING = {"sliding_window": 5, "sliding_window_pattern": 2}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
# Keys of config.json that families have besides the usual ones, chosen so that each choice of a family takes effect.
FAMILY_KEYS = {
    "MixtralForCausalLM": {"num_local_experts": 3},
    "GptOssForCausalLM": {
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "swiglu_limit": 1.0,
        "rope_scaling": {**_YARN, "truncate": False},
    },
    "Qwen3MoeForCausalLM": {**_EXPERTS, "mlp_only_layers": [0]},
    "Qwen2MoeForCausalLM": {**_EXPERTS, "shared_expert_intermediate_size": 36},  # no whole experts
    "GraniteForCausalLM": {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0]},
    "Phi3ForCausalLM": {
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 32,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.5, 2.0, 2.5, 3.0, 3.5, 4.0],
        },
    },
    "OPTForCausalLM": {"ffn_dim": 96, "do_layer_norm_before": False, "word_embed_proj_dim": 24},
    "Gemma2ForCausalLM": {
        "sliding_window": 5,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "DeepseekV3ForCausalLM": {
        **_LATENTS,
        **_ROUTED,
        "qk_nope_head_dim": 12,
        "v_head_dim": 20,
        "n_shared_experts": 2,
        "n_group": 3,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "rope_scaling": {
            "type": "yarn",  # the older name of the key
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    },
    "Glm4MoeLiteForCausalLM": {**_LATENTS, **_ROUTED, "qk_nope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 5},
    "Gemma3ForCausalLM": {**_SLIDING, "query_pre_attn_scalar": 24},
    # The two upper layers read the caches of the two below, whose full attention has keys for values.
    "Gemma4ForCausalLM": {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 2],
        "sliding_window": 5,
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 101,
        "final_logit_softcapping": 3.0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    "Gemma4UnifiedForCausalLM": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
        "global_head_dim": 32,
    },
    "Glm4MoeForCausalLM": {**_ROUTED, "use_qk_norm": True, "attention_bias": True},
    "MiniMaxM2ForCausalLM": {"num_local_experts": 3, "num_experts_per_tok": 2, "rotary_dim": 8},
    "Olmo3ForCausalLM": {**_SLIDING, "rope_scaling": _YARN},
    "Ministral3ForCausalLM": {
        "rope_parameters": {**_YARN, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3},
    },
    "SeedOssForCausalLM": {"attention_out_bias": True},
    "Exaone4ForCausalLM": _SLIDING,
    "HunYuanDenseV1ForCausalLM": {"rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}},
}
# Heads of keys that four devices divide, and values of another size; the last layer has attention.
_DELTA_NETS = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "partial_rotary_factor": 0.5,
}
_SHARED_WITH_GATE = {**_EXPERTS, "shared_expert_intermediate_size": 48}
FAMILY_KEYS |= {
    "Qwen3_5ForCausalLM": {**_DELTA_NETS, "model_type": "qwen3_5_text", "rope_scaling": _YARN},
    "Qwen3_5MoeForCausalLM": {**_DELTA_NETS, **_SHARED_WITH_GATE, "model_type": "qwen3_5_moe_text"},
    "Qwen3NextForCausalLM": {**_DELTA_NETS, **_SHARED_WITH_GATE, "model_type": "qwen3_next", "mlp_only_layers": [1]},
}
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def tiny_config(architecture: str = "LlamaForCausalLM", **overrides) -> dict:
    """config.json of a model with V=97, D=64, F=96, L=2, N=4, G=2, H=16; a value of None removes its key."""
    config = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **FAMILY_KEYS.get(architecture, {}),
        **overrides,
    }
    keep_null = ("sliding_window", "rope_scaling")
    return {key: value for key, value in config.items() if value is not None or key in keep_null}


def wide(architecture: str) -> dict:
    """Keys of a config whose heads, experts and widths 6 and 8 devices divide; there are two KV heads, but with latents each
    head has its own."""
    latents = architecture.startswith(("DeepseekV3", "Glm4MoeLite"))
    heads = {"num_attention_heads": 24, "num_key_value_heads": 24 if latents else 2, "head_dim": 8}
    states = {"linear_num_key_heads": 24, "linear_num_value_heads": 48, "linear_key_head_dim": 4}
    keys = {**heads, **states, "num_experts": 24, "n_routed_experts": 24, "num_local_experts": 24}
    return {key: value for key, value in keys.items() if key in tiny_config(architecture)}


def tiny_checkpoint(
    path: str | os.PathLike,
    architecture: str = "LlamaForCausalLM",
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    **overrides,
) -> Path:
    """Write a random checkpoint and return its folder.

    Args:
      path: the folder, created if need be.
      architecture: one of ``ARCHITECTURES``.
      seed: of the weights.
      dtype: of the tensors on disk: ``float32``, ``float16`` or ``bfloat16``.
      shards: files; above 1 an index is written.
      overrides: keys of config.json; see ``tiny_config``.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny_config(architecture, **overrides)))
    model = read_config(Folder(folder))
    apart = rearranged_tensors(model)
    parts = {part.name for whole in apart.values() for part in whole.parts}
    shapes = {name: rows.shape for name, rows in tensor_table(model).items() if name not in parts}
    shapes |= file_shapes(model) | {name: whole.shape for name, whole in apart.items()}
    rng = np.random.default_rng(seed)
    tensors = {name: _random(rng, name, shape, dtype) for name, shape in shapes.items()}
    write_weights(folder, tensors, shards)
    return folder


def write_weights(folder: Path, tensors: dict[str, np.ndarray], shards: int = 1):
    """``tensors`` as model.safetensors, or dealt out to ``shards`` files with an index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        held: Sequence[str] = list(tensors)[shard::shards]
        save_file({name: tensors[name] for name in held}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def tiny_tokenizer(folder: str | os.PathLike, first: str = "<s>"):
    """Add a byte-level tokenizer of 258 tokens to a folder: ``first``, </s> and the 256 bytes, in that order."""
    special = [first, "</s>"]
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(special + bytes_)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(Path(folder) / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": first, "eos_token": "</s>"}
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings))


def smallest(folder: Path, **overrides) -> Path:
    """A checkpoint of one layer with a tokenizer, whose programs compile in seconds."""
    sizes = {"vocab_size": 258, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 4}
    tiny_tokenizer(tiny_checkpoint(folder, **{**sizes, "bos_token_id": 0, "eos_token_id": 1, **overrides}))
    return folder


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if name.endswith("_blocks"):
        return rng.integers(0, 256, shape, np.uint8)
    if name.endswith("_scales"):
        return rng.integers(121, 125, shape, np.uint8)
    noise = rng.standard_normal(shape)
    if name.endswith("A_log"):  # states that remember from a few tokens to hundreds
        return (1.5 * noise - 3).astype(DTYPES[dtype])
    if name.endswith("bias"):
        return (0.1 * noise).astype(DTYPES[dtype])
    return (1 + 0.1 * noise if len(shape) == 1 else noise * shape[1] ** -0.5).astype(DTYPES[dtype])
