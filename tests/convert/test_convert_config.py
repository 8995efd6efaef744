"""config.json in its many spellings, and integers that no model has."""

import json

import pytest
from tiny import tiny_config

from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.huggingface.config import read_config
from jspec.config import ModelConfig, Rope


def read(folder, config: dict, generation: dict | None = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_config(Folder(folder))


def test_sizes_and_defaults_are_read(tmp_path):
    config = tiny_config(num_key_value_heads=None, head_dim=None, rope_theta=None, rms_norm_eps=None)
    found = read(tmp_path, config)
    assert (found.num_kv_heads, found.head_dim, found.rope, found.rms_norm_eps) == (4, 16, Rope(), 1e-6)
    assert (found.bos_token_id, found.eos_token_ids) == (1, (2,))


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim"])
def test_null_means_derived(tmp_path, key):
    found = read(tmp_path, {**tiny_config("Qwen3ForCausalLM"), key: None})
    assert (found.num_kv_heads, found.head_dim) == ((4, 16) if key == "num_key_value_heads" else (2, 16))


def test_absent_keys_take_the_class_default(tmp_path):
    mistral = tiny_config("MistralForCausalLM", num_attention_heads=16, num_key_value_heads=None)
    del mistral["sliding_window"]
    found = read(tmp_path, mistral)
    assert (found.num_kv_heads, found.windows) == (8, (4096, 4096))
    assert read(tmp_path, tiny_config("Qwen3ForCausalLM", head_dim=None)).head_dim == 128


def test_biases_by_architecture(tmp_path):
    def flags(architecture, **overrides):
        found = read(tmp_path, tiny_config(architecture, **overrides))
        return found.qkv_bias, found.output_bias, found.mlp_bias, found.qk_norm

    assert flags("LlamaForCausalLM", attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert flags("MistralForCausalLM", attention_bias=True) == (False, False, False, False)
    assert flags("Qwen2ForCausalLM") == (True, False, False, False)
    assert flags("Qwen3ForCausalLM", attention_bias=True) == (True, True, False, True)


@pytest.mark.parametrize(
    ("overrides", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0}, (None, None, None)),
        ({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}, (None, 5, 5)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            },
            (5, None, None),
        ),
    ],
)
def test_qwen_windows_follow_the_switch(tmp_path, overrides, windows):
    assert read(tmp_path, tiny_config("Qwen2ForCausalLM", num_hidden_layers=3, **overrides)).windows == windows


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}},
    ],
)
def test_old_and_new_rope_keys_mean_the_same(tmp_path, spelling):
    found = read(tmp_path, tiny_config(**spelling))
    assert found.rope == Rope(theta=5e5, kind="linear", factor=4.0)


def test_llama3_rope(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    found = read(tmp_path, tiny_config(max_position_embeddings=131072, rope_scaling=scaling))
    assert found.max_position == 131072
    assert found.rope == Rope(kind="llama3", factor=32.0, original_max_position=8192)


def test_dynamic_rope_stops_at_the_trained_length(tmp_path):
    found = read(tmp_path, tiny_config(rope_scaling={"type": "dynamic", "factor": 2.0}))
    assert (found.rope.kind, found.max_position) == ("dynamic", 256)


def test_eos_ids_are_united(tmp_path):
    found = read(tmp_path, tiny_config(eos_token_id=[3, 2]), {"eos_token_id": [2, 7]})
    assert found.eos_token_ids == (3, 2, 7)
    assert read(tmp_path, tiny_config(eos_token_id=None), {"eos_token_id": 9}).eos_token_ids == (9,)


def refuses(folder, config: dict, overrides: dict, message: str):
    """That a config is refused with one sentence; ``...`` in it stands for the last key that differs, and its value."""
    key, value = list(overrides.items())[-1]
    with pytest.raises(Refusal) as refusal:
        read(folder, config)
    said = str(refusal.value)
    assert said.startswith(f"{folder}/config.json: ")
    assert message.replace("...", f"{key}={value!r}") in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "...: not read, because some of its layers have a recurrent"),
        (
            {"architectures": ["Qwen3Forcausallm"]},
            "expected one class of those that docs/guides/models.md lists; the nearest are Qwen3ForCausalLM, ",
        ),
        ({"architectures": ["???"]}, "...: expected one class of those that docs/guides/models.md lists"),
        ({"architectures": ["A", "B"]}, "...: expected one class of those"),
        ({"architectures": None, "model_type": None}, "architectures=None: expected one class of those"),
        ({"architectures": None, "model_type": "mamba"}, "model_type='mamba': not read, because"),
        ({"auto_map": {"AutoModel": "modeling.Model"}}, "remote code"),
        ({"quantization_config": {"quant_method": "hqq"}}, "hqq"),
        ({"hidden_act": "quick_gelu"}, "...: expected one of silu, swish, gelu"),
        ({"hidden_size": -1}, "...: expected an integer"),
        ({"hidden_size": 64.0}, "..."),
        ({"hidden_size": True}, "..."),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": 2**31}, "..."),
        ({"num_hidden_layers": 10**6}, "...: expected an integer in 1..4096"),
        ({"intermediate_size": 2**31 - 1, "hidden_size": 2**31 - 1}, "beyond any model"),
        ({"num_key_value_heads": 3}, "...: expected a divisor of num_attention_heads, 4"),
        ({"head_dim": 15}, "...: expected an even number"),
        ({"head_dim": None, "hidden_size": 66}, "hidden_size=66: expected a multiple of num_attention_heads"),
        ({"rms_norm_eps": 0}, "...: expected a positive number"),
        ({"rope_theta": 10**400}, "rope_theta="),
        ({"tie_word_embeddings": "false"}, "...: expected true or false"),
        ({"eos_token_id": [2, 97]}, "...: expected token ids in 0..96"),
        ({"rope_scaling": {"type": "axial"}}, "rope_scaling.type='axial': expected one of"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_scaling.short_factor is missing"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -4.0}}, "rope_scaling.factor=-4.0"),
        ({"rope_scaling": [1]}, "...: expected an object or null"),
        ({"partial_rotary_factor": 0.5}, "...: expected 1"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types="),
        ({"layer_types": ["full_attention"]}, "...: expected 2 entries"),
    ],
)
def test_bad_values_are_refused(tmp_path, overrides, message):
    refuses(tmp_path, {**tiny_config(), **overrides}, overrides, message)


@pytest.mark.parametrize(
    ("architecture", "overrides", "message"),
    [
        ("GraniteForCausalLM", {"residual_multiplier": -0.2}, "...: expected a positive number"),
        ("GraniteForCausalLM", {"logits_scaling": "8"}, "...: expected a positive number"),
        ("GraniteForCausalLM", {"partial_rotary_factor": 0.5}, "...: expected 1"),
        ("Olmo2ForCausalLM", {"layer_types": ["sliding_attention"] * 2}, "a sliding_window for its sliding_attention"),
        ("Olmo2ForCausalLM", {"hidden_act": "mish"}, "...: expected one of silu"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 4}, "...: expected an integer in 1..3"),
        ("MixtralForCausalLM", {"num_local_experts": 0}, "...: expected an integer"),
        ("MixtralForCausalLM", {"num_local_experts": 5000}, "...: expected an integer in 1..1024"),
        ("MixtralForCausalLM", {"hidden_act": "gelu"}, "activation='gelu': expected 'silu' with experts (hidden_act"),
        ("Qwen3MoeForCausalLM", {"num_experts": "8"}, "...: expected an integer"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": 1}, "...: expected a list of layers"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0.5]}, "...: expected a list of layers"),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 0}, "...: expected an integer"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "...: expected a list of 2 numbers"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 2]}, "..."),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, [0]]}, "..."),
        (
            "SmolLM3ForCausalLM",
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5},
            "and its use switched on",
        ),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling.type='linear': expected",
        ),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "su", "short_factor": [1.0]}}, "long_factor is missing"),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}},
            "rope.short_factors=(1.0,): expected 6 numbers",
        ),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "su", "short_factor": [0.0], "long_factor": [2.0]}},
            "short_factor=[0.0]: expected a list of positive numbers",
        ),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 1.5, "rope_scaling": None}, "rope.fraction=1.5: expected"),
        (
            "Phi3ForCausalLM",
            {"partial_rotary_factor": 0.2, "rope_scaling": None},
            "rope.fraction=0.2: expected an even",
        ),
        ("DeepseekV3ForCausalLM", {"num_key_value_heads": 2}, "...: expected num_attention_heads, 4"),
        ("DeepseekV3ForCausalLM", {"n_group": 4}, "experts.groups=4: expected groups of at least two"),
        ("DeepseekV3ForCausalLM", {"n_group": 6, "topk_group": 2}, "experts.groups=6: expected groups of at least two"),
        ("DeepseekV3ForCausalLM", {"topk_group": 4}, "experts.chosen_groups=4: expected at most 3 groups"),
        ("DeepseekV3ForCausalLM", {"num_experts_per_tok": 5}, "experts.chosen_groups=2: expected at most 3 groups"),
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "...: expected 'sigmoid'"),
        ("DeepseekV3ForCausalLM", {"topk_method": "greedy"}, "...: expected 'noaux_tc'"),
        ("DeepseekV3ForCausalLM", {"moe_layer_freq": 2}, "...: expected 1"),
        ("DeepseekV3ForCausalLM", {"n_shared_experts": -1}, "...: expected an integer"),
        ("DeepseekV3ForCausalLM", {"qk_rope_head_dim": 7}, "latent.rotated=7: expected an even number"),
        ("DeepseekV3ForCausalLM", {"kv_lora_rank": 0}, "...: expected an integer"),
        ("DeepseekV3ForCausalLM", {"q_lora_rank": "many"}, "...: expected an integer"),
        ("DeepseekV3ForCausalLM", {"num_nextn_predict_layers": -1}, "...: expected an integer"),
        ("Glm4MoeLiteForCausalLM", {"v_head_dim": -2}, "...: expected an integer"),
        ("Glm4MoeLiteForCausalLM", {"n_routed_experts": 10**6}, "...: expected an integer"),
        (
            "Glm4MoeLiteForCausalLM",
            {"mlp_layer_types": ["dense"]},
            "...: expected a list of 'dense' or 'sparse' for each of 2 layers",
        ),
        ("OPTForCausalLM", {"ffn_dim": None}, "ffn_dim is missing"),
        ("OPTForCausalLM", {"activation_function": "tanh"}, "...: expected one of"),
        ("OPTForCausalLM", {"layer_norm_elementwise_affine": False}, "...: expected true"),
        ("OPTForCausalLM", {"word_embed_proj_dim": 0}, "...: expected an integer"),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": 0}, "...: expected a positive number"),
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "...: expected false"),
        ("Gemma2ForCausalLM", {"hidden_activation": "silu2"}, "...: expected one of"),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 0}, "...: expected a positive number"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "...: expected null"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, "...: expected an integer"),
        ("Gemma3ForCausalLM", {"rope_local_base_freq": -1}, "...: expected a positive number"),
        (
            "Gemma3ForCausalLM",
            {"rope_parameters": {"full_attention": {"rope_type": "su"}}},
            "rope_parameters.rope_type='su': expected one of",
        ),
        ("Glm4MoeForCausalLM", {"partial_rotary_factor": 0.1}, "rope.fraction=0.1: expected an even number"),
        ("Glm4MoeForCausalLM", {"use_qk_norm": "yes"}, "...: expected true or false"),
        ("Glm4MoeForCausalLM", {"n_group": 4}, "experts.groups=4: expected groups of at least two"),
        ("Glm4MoeForCausalLM", {"scoring_func": "softmax"}, "...: expected 'sigmoid'"),
        ("MiniMaxM2ForCausalLM", {"rotary_dim": 32}, "...: expected at most head_dim, 16"),
        ("MiniMaxM2ForCausalLM", {"rotary_dim": 7}, "rope.fraction=0.4375: expected an even number"),
        ("MiniMaxM2ForCausalLM", {"use_qk_norm": False}, "...: expected true"),
        ("MiniMaxM2ForCausalLM", {"scoring_func": "softmax"}, "...: expected 'sigmoid'"),
        ("MiniMaxM2ForCausalLM", {"attn_type_list": [1, 0]}, "...: expected a list of ones"),
        ("MiniMaxM2ForCausalLM", {"shared_intermediate_size": 8}, "...: expected 0"),
        ("MiniMaxM2ForCausalLM", {"layernorm_mlp_beta": 3.5}, "...: expected 1"),
        (
            "Ministral3ForCausalLM",
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            "rope_parameters.original_max_position_embeddings is missing",
        ),
        (
            "Ministral3ForCausalLM",
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": -1}},
            "rope_parameters.llama_4_scaling_beta=-1: expected a positive number",
        ),
        ("SeedOssForCausalLM", {"attention_out_bias": 1}, "...: expected true or false"),
        ("Exaone4ForCausalLM", {"sliding_window_pattern": "LG"}, "...: expected an integer"),
        ("Olmo3ForCausalLM", {"sliding_window_pattern": 0}, "...: expected an integer"),
        ("HunYuanDenseV1ForCausalLM", {"use_qk_norm": False}, "...: expected true"),
        ("HunYuanDenseV1ForCausalLM", {"use_cla": True}, "...: expected false"),
        ("HunYuanDenseV1ForCausalLM", {"attention_head_dim": 8}, "...: expected head_dim, 16"),
        (
            "HunYuanDenseV1ForCausalLM",
            {"rope_scaling": {"type": "dynamic", "alpha": -5, "factor": 1.0}},
            "rope_scaling.alpha=-5: expected a positive number",
        ),
    ],
)
def test_bad_values_of_a_family_are_refused(tmp_path, architecture, overrides, message):
    refuses(tmp_path, tiny_config(architecture, **overrides), overrides, message)


def test_a_multimodal_config_without_its_text_model_is_refused(tmp_path):
    with pytest.raises(Refusal, match=r"config\.json: text_config is missing"):
        read(tmp_path, {**tiny_config(), "architectures": ["Gemma3ForConditionalGeneration"]})
    nested = tiny_config("Gemma3ForCausalLM", hidden_size="x")
    with pytest.raises(Refusal, match=r"text_config\.hidden_size='x'"):
        read(tmp_path, {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": nested})


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"hidden_size": NaN}', "[" * 100_000, '{"vocab_size": ' + "9" * 5000 + "}", "\xff"]
)
def test_unreadable_json_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(Refusal, match=r"config\.json"):
        read_config(Folder(tmp_path))
