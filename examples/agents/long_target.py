"""A target with random weights, the shipped tokenizer and a long context, for the long prompts of agents."""

import json
import pathlib
import shutil

import numpy as np
from safetensors.numpy import save_file

from jspec.commands.demo import FAMILY

D, N, H, V, S = 32, 2, 16, 2048, 131_072


def long_target(folder: pathlib.Path) -> pathlib.Path:
    """Writes the checkpoint into ``folder``: one layer of Llama."""
    folder.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FAMILY / "target" / file, folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": D,
        "intermediate_size": 2 * D,
    }
    config |= {
        "num_hidden_layers": 1,
        "num_attention_heads": N,
        "num_key_value_heads": 1,
        "head_dim": H,
        "vocab_size": V,
    }
    config |= {"max_position_embeddings": S, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 0, "torch_dtype": "float32"}))
    layer = {"self_attn.q_proj": (N * H, D), "self_attn.k_proj": (H, D), "self_attn.v_proj": (H, D)}
    layer |= {"self_attn.o_proj": (D, N * H), "mlp.gate_proj": (2 * D, D), "mlp.up_proj": (2 * D, D)}
    layer |= {"mlp.down_proj": (D, 2 * D)}
    rng = np.random.default_rng(0)
    drawn = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()} | {
        "model.embed_tokens.weight": (V, D)
    }
    tensors = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in drawn.items()}
    norms = ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm")
    tensors |= {f"model.{name}.weight": np.ones(D, np.float32) for name in norms}
    save_file(tensors, folder / "model.safetensors")
    return folder
