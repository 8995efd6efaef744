"""Configs of published checkpoints with gated delta nets, with the keys that their files have."""

import json

import pytest
from read_configs import found, read

from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.huggingface.config import read_config
from jspec.config import DeltaNets, Experts, Rope

EVERY_FOURTH = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
NETS = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
}
TEXT = {
    **NETS,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "bos_token_id": None,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "pad_token_id": None,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 248320,
}
OUTER = {
    "image_token_id": 248056,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 248057,
    "vision_config": {"depth": 27, "hidden_size": 1152},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}
OF_27B = {
    **TEXT,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": EVERY_FOURTH * 16,
    "linear_num_value_heads": 48,
    "model_type": "qwen3_5_text",
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
}
OF_35B = {
    **TEXT,
    "hidden_size": 2048,
    "layer_types": EVERY_FOURTH * 10,
    "linear_num_value_heads": 32,
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
}
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": [
        "lm_head",
        "model.language_model.embed_tokens",
        "model.language_model.layers.0.linear_attn.conv1d",
        "model.language_model.layers.0.linear_attn.in_proj_a",
        "model.language_model.layers.0.linear_attn.in_proj_b",
        "model.language_model.layers.0.mlp.gate",
        "model.language_model.layers.0.mlp.shared_expert_gate",
        "mtp.fc",
    ],
}


def wrapped(text, kind="qwen3_5", name="Qwen3_5", **more):
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": kind,
        "text_config": text,
        **OUTER,
        **more,
    }


@pytest.mark.parametrize("own", [{}, {"language_model_only": False}], ids=["3.5 and 3.6", "3.8"])
def test_27b(tmp_path, own):
    """Qwen3.8 says in words which gate there is, and that images are read."""
    text = OF_27B | ({"output_gate_type": "swish"} if own else {})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [248046, 248044]}))
    config = read(tmp_path, wrapped(text, **own))
    assert config.delta_nets == DeltaNets(16, 48, 128, 128, 4, (True, True, True, False) * 16)
    assert config.rope == Rope(theta=1e7, fraction=0.25)
    assert found(
        config, "architecture", "norm", "qk_norm", "attention_gate", "experts", "tie_embeddings", "mtp_layers"
    ) == (
        "Qwen3_5ForCausalLM",
        *("rms_offset", True, True, None, False, 1),
    )
    assert config.eos_token_ids == (248044, 248046)
    assert 26.8e9 < config.num_parameters < 27e9
    assert config.delta_nets.row_bytes(0, 2) == 48 * 48 * 128 * 128 * 4 + 48 * 3 * 10240 * 2  # 151 MB and 2.9 MB


@pytest.mark.parametrize("quantization", [None, FP8], ids=["bfloat16", "fp8"])
def test_35b_a3b(tmp_path, quantization):
    """Whether weights are in blocks of FP8, the tensors say."""
    own = {} if quantization is None else {"quantization_config": quantization}
    config = read(tmp_path, wrapped(OF_35B, "qwen3_5_moe", "Qwen3_5Moe", **own))
    assert config.delta_nets == DeltaNets(16, 32, 128, 128, 4, (True, True, True, False) * 10)
    assert config.experts == Experts(256, 8, 512, shared=1, shared_gate=True)
    assert found(config, "architecture", "quantization", "mtp_layers") == ("Qwen3_5MoeForCausalLM", None, 1)
    assert 34e9 < config.num_parameters < 35e9


def test_next_80b_a3b(tmp_path):
    """It has neither ``layer_types`` nor a key for its layer for multi-token prediction."""
    config = read(
        tmp_path,
        {
            **{key: value for key, value in NETS.items() if key != "mamba_ssm_dtype"},
            "architectures": ["Qwen3NextForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "decoder_sparse_step": 1,
            "eos_token_id": 151645,
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 5120,
            "linear_num_value_heads": 32,
            "max_position_embeddings": 262144,
            "mlp_only_layers": [],
            "model_type": "qwen3_next",
            "moe_intermediate_size": 512,
            "norm_topk_prob": True,
            "num_attention_heads": 16,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "num_hidden_layers": 48,
            "num_key_value_heads": 2,
            "output_router_logits": False,
            "partial_rotary_factor": 0.25,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 10000000,
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 512,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.57.0.dev0",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
    )
    assert config.delta_nets == DeltaNets(16, 32, 128, 128, 4, (True, True, True, False) * 12)
    assert config.experts == Experts(512, 10, 512, layers=(True,) * 48, shared=1, shared_gate=True)
    assert config.rope == Rope(theta=1e7, fraction=0.25)
    assert config.mtp_layers == 1
    assert 79e9 < config.num_parameters < 81e9


def test_another_gate_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(wrapped({**OF_27B, "output_gate_type": "sigmoid"})))
    with pytest.raises(Refusal, match=r"text_config\.output_gate_type='sigmoid': expected 'swish' or 'silu'"):
        read_config(Folder(tmp_path))


def test_a_successor_of_another_architecture_is_refused_by_name(tmp_path):
    raw = wrapped({**OF_35B, "model_type": "qwen4_exp_text"}, "qwen4_exp", "Qwen4Exp")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(
        Refusal, match=r"architectures=\['Qwen4ExpForConditionalGeneration'\]: not read, because it has hyper"
    ):
        read_config(Folder(tmp_path))
