"""Configs of well-known checkpoints, with the keys that published files have: what is read, and that nobody is warned."""

import pytest
from read_configs import found, read

from jspec.config import Experts, Rope


def test_glm_4_6(tmp_path):
    config = read(
        tmp_path,
        {
            "architectures": ["Glm4MoeForCausalLM"],
            "attention_bias": True,
            "attention_dropout": 0.0,
            "pad_token_id": 151329,
            "eos_token_id": [151329, 151336, 151338],
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "partial_rotary_factor": 0.5,
            "initializer_range": 0.02,
            "intermediate_size": 12288,
            "max_position_embeddings": 202752,
            "model_type": "glm4_moe",
            "moe_intermediate_size": 1536,
            "norm_topk_prob": True,
            "num_attention_heads": 96,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 160,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "num_hidden_layers": 92,
            "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.54.0",
            "use_cache": True,
            "use_qk_norm": True,
            "vocab_size": 151552,
        },
    )
    assert found(config, "qkv_bias", "output_bias", "qk_norm", "mtp_layers") == (True, False, True, 1)
    assert config.rope == Rope(theta=1e6, fraction=0.5)
    assert config.eos_token_ids == (151329, 151336, 151338)
    layers = (False,) * 3 + (True,) * 89
    how = {"scores": "sigmoid", "scale": 2.5, "corrected": True, "shared": 1}
    assert config.experts == Experts(160, 8, 1536, True, layers, **how)
    assert 350e9 < config.num_parameters < 360e9


def test_minimax_m2(tmp_path):
    config = read(
        tmp_path,
        {
            "architectures": ["MiniMaxM2ForCausalLM"],
            "attn_type_list": [1] * 62,
            "auto_map": {"AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM"},
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "max_position_embeddings": 196608,
            "mlp_intermediate_size": 8192,
            "model_type": "minimax_m2",
            "mtp_transformer_layers": 1,
            "num_attention_heads": 48,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 62,
            "num_key_value_heads": 8,
            "num_local_experts": 256,
            "num_mtp_modules": 3,
            "qk_norm_type": "per_layer",
            "quantization_config": {
                "activation_scheme": "dynamic",
                "fmt": "float8_e4m3fn",
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
            },
            "rms_norm_eps": 1e-06,
            "rope_theta": 5000000,
            "rotary_dim": 64,
            "scoring_func": "sigmoid",
            "shared_intermediate_size": 0,
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_mtp": True,
            "use_qk_norm": True,
            "use_routing_bias": True,
            "vocab_size": 200064,
        },
    )
    assert config.rope == Rope(theta=5e6, fraction=0.5)
    assert found(config, "qk_norm", "qk_norm_over", "mtp_layers", "quantization") == (True, "projection", 0, None)
    assert config.experts == Experts(256, 8, 1536, scores="sigmoid", corrected=True)
    assert 228e9 < config.num_parameters < 231e9


def test_qwen2_5_vl_7b(tmp_path):
    """Its config.json is flat."""
    config = read(
        tmp_path,
        {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "vision_start_token_id": 151652,
            "vision_end_token_id": 151653,
            "vision_token_id": 151654,
            "image_token_id": 151655,
            "video_token_id": 151656,
            "hidden_act": "silu",
            "hidden_size": 3584,
            "initializer_range": 0.02,
            "intermediate_size": 18944,
            "max_position_embeddings": 128000,
            "max_window_layers": 28,
            "model_type": "qwen2_5_vl",
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.41.2",
            "use_cache": True,
            "use_sliding_window": False,
            "vision_config": {"depth": 32, "hidden_act": "silu", "hidden_size": 1280},
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "vocab_size": 152064,
        },
    )
    assert found(config, "architecture", "rope", "qkv_bias") == ("Qwen2ForCausalLM", Rope(theta=1e6), True)
    assert set(config.windows) == {None}
    assert 7.6e9 < config.num_parameters < 7.7e9


def test_qwen3_vl_30b(tmp_path):
    config = read(
        tmp_path,
        {
            "architectures": ["Qwen3VLMoeForConditionalGeneration"],
            "image_token_id": 151655,
            "model_type": "qwen3_vl_moe",
            "text_config": {
                "attention_bias": False,
                "attention_dropout": 0.0,
                "bos_token_id": 151643,
                "decoder_sparse_step": 1,
                "dtype": "bfloat16",
                "eos_token_id": 151645,
                "head_dim": 128,
                "hidden_act": "silu",
                "hidden_size": 2048,
                "initializer_range": 0.02,
                "intermediate_size": 6144,
                "max_position_embeddings": 262144,
                "mlp_only_layers": [],
                "model_type": "qwen3_vl_moe_text",
                "moe_intermediate_size": 768,
                "norm_topk_prob": True,
                "num_attention_heads": 32,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "num_hidden_layers": 48,
                "num_key_value_heads": 4,
                "rms_norm_eps": 1e-06,
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
                "rope_theta": 5000000,
                "use_cache": True,
                "vocab_size": 151936,
            },
            "tie_word_embeddings": False,
            "transformers_version": "4.57.0.dev0",
            "video_token_id": 151656,
            "vision_config": {"depth": 27},
            "vision_end_token_id": 151653,
            "vision_start_token_id": 151652,
        },
    )
    assert found(config, "architecture", "rope") == ("Qwen3MoeForCausalLM", Rope(theta=5e6))
    assert config.experts == Experts(128, 8, 768, layers=(True,) * 48)
    assert 30e9 < config.num_parameters < 31e9


@pytest.mark.parametrize("kind", ["mistral", "ministral3"])
def test_mistral_small_and_ministral_3(tmp_path, kind):
    """Neither says outside ``text_config`` whether its output head is tied to the embedding."""
    scaling = {
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "max_position_embeddings": 262144,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
            "type": "yarn",
        }
    }
    text = {
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": kind,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "sliding_window": None,
        "use_cache": True,
        "vocab_size": 131072,
        **({"rope_theta": 1000000000.0} if kind == "mistral" else scaling),
    }
    outer = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 10,
        "model_type": "mistral3",
        "text_config": text,
        "vision_config": {"model_type": "pixtral"},
    }
    config = read(tmp_path, outer)
    assert found(config, "head_dim", "tie_embeddings") == (128, False)
    grown = Rope(1e6, "yarn", 16.0, original_max_position=16384, query_growth=0.1)
    assert config.rope == (Rope(theta=1e9) if kind == "mistral" else grown)
    assert 23.5e9 < config.num_parameters < 23.7e9
