"""Families whose layers have an MLP each."""

from jspec.checkpoints.huggingface.families import family_keys
from jspec.checkpoints.huggingface.families.family import Family
from jspec.checkpoints.huggingface.rope import (
    no_ropes,
    read_phi3_rope,
    read_ropes_by_attention,
    read_ropes_of_some_layers,
)
from jspec.checkpoints.huggingface.windows import all_but_every_nth, always, from_a_layer_on, without_rotation

_GEMMA = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

DENSE = {
    "LlamaForCausalLM": Family(
        "Llama 1 to 3.2, Vicuna, and others of the same layout",
        {"max_position_embeddings": 2048},
        biases="configured",
        mlp_bias=True,
    ),
    "MistralForCausalLM": Family(
        "Mistral 7B, Nemo",
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        slides=always,
    ),
    "Qwen2ForCausalLM": Family(
        "Qwen2, Qwen2.5",
        {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
        slides=from_a_layer_on,
        window_switch=True,
        lists_windows=True,
        biases="qkv",
    ),
    "Qwen3ForCausalLM": Family(
        "Qwen3 dense",
        {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
        {"qk_norm": True},
        slides=from_a_layer_on,
        window_switch=True,
        lists_windows=True,
        biases="configured",
    ),
    "GraniteForCausalLM": Family(
        "Granite 3 dense",
        {"max_position_embeddings": 2048},
        biases="configured",
        mlp_bias=True,
        more=family_keys.multipliers,
    ),
    "Olmo2ForCausalLM": Family(
        "OLMo 2",
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        {"norm": "rms_wide", "norm_placement": "after", "qk_norm": True, "qk_norm_over": "projection"},
        biases="configured",
    ),
    "SmolLM3ForCausalLM": Family(
        "SmolLM3",
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
        },
        slides=without_rotation,
        window_switch=True,
        lists_windows=True,
        biases="configured",
        mlp_bias=True,
        ropes=read_ropes_of_some_layers,
    ),
    "Phi3ForCausalLM": Family(
        "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
        {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        slides=always,
        ropes=read_phi3_rope,
        own_code=True,
    ),
    "OPTForCausalLM": Family(
        "OPT 125m to 66b",
        {
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "activation_function": "relu",
            "tie_word_embeddings": True,
        },
        {"norm": "layer", "gated_mlp": False, "rope": None, "position_offset": 2},
        keys={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        ropes=no_ropes,
        more=family_keys.opt,
    ),
    "Gemma2ForCausalLM": Family(
        "Gemma 2",
        {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window_pattern": 2},
        {"norm": "rms_offset", "norm_placement": "around"},
        keys={"hidden_act": "hidden_activation"},
        slides=all_but_every_nth,
        lists_windows=True,
        biases="configured",
        more=family_keys.gemma2,
    ),
    "Gemma3ForCausalLM": Family(
        "Gemma 3, the text models of 4B and more among them",
        {**_GEMMA, "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6},
        {"norm": "rms_offset", "norm_placement": "around", "qk_norm": True},
        keys={"hidden_act": "hidden_activation"},
        slides=all_but_every_nth,
        lists_windows=True,
        biases="configured",
        ropes=read_ropes_by_attention,
        more=family_keys.gemma3,
    ),
}
