"""Tiny models whose logits are compared with transformers: what each of them sets in its transformers config.

A family of ``jspec.checkpoints.huggingface.families`` has a few lines here, for each of its choices that a config
decides. The table in docs/guides/models.md names them."""

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
SLIDING = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
QWEN3_MOE = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
PARTIAL = {"rope_theta": 1e4, "partial_rotary_factor": 0.75}
# Factors for 8 rotary pairs, which a head of 16 numbers has; longer than the original length, texts take the long ones.
LONG_FACTORS = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0],
}
SIX = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.5, 2.0, 2.5, 3.0, 3.5, 4.0]}
GEMMA2 = {
    "tie_word_embeddings": True,
    "sliding_window": 7,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
GEMMA3 = {"tie_word_embeddings": True, "sliding_window": 7, "query_pre_attn_scalar": 24}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
TWO_KINDS = ["sliding_attention", "full_attention"]
GEMMA4 = {
    "tie_word_embeddings": True,
    "sliding_window": 7,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
    "num_hidden_layers": 4,
    "layer_types": TWO_KINDS * 2,
}
GEMMA4_LARGE = {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24}
GEMMA4_SMALL = {
    **GEMMA4,
    "num_hidden_layers": 6,
    "layer_types": TWO_KINDS * 3,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 101,
}
GPT_OSS = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
    "rope_parameters": {**YARN, "truncate": False},
    "swiglu_limit": 0.5,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "head_dim": 8,  # what transformers rotates
    "v_head_dim": 20,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
GLM = {key: value for key, value in DEEPSEEK.items() if key not in ("n_group", "topk_group", "first_k_dense_replace")}
GLM4_MOE = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
MINIMAX = {"num_local_experts": 5, "num_experts_per_tok": 2, "rotary_dim": 8}
OLMO3_ROPES = {
    "full_attention": {**YARN, "attention_factor": 1.2, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}
GROWING = {
    **YARN,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
YARN_SCORES = {"rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.1}}
LONGROPE = {"rope_parameters": LONG_FACTORS, "original_max_position_embeddings": 32}
# Three of four layers have gated delta nets, and texts are longer than two of their chunks of 64 tokens.
DELTA_NETS = {
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
DELTA_EXPERTS = {**DELTA_NETS, **QWEN3_MOE, "shared_expert_intermediate_size": 48}
DELTA_LISTED = {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]}
SECTIONS = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}

CASES = {
    "llama": ("Llama", {}),
    "llama-wide-head": ("Llama", {"head_dim": 32}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "llama-odd-ratio": ("Llama", {"num_attention_heads": 6, "hidden_size": 96, "num_key_value_heads": 2}),
    "llama-no-groups": ("Llama", {"num_key_value_heads": 4}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "llama-dynamic-rope": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "llama-yarn-rope": ("Llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": ("Llama", {"rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.1}}),
    "llama-yarn-attention": ("Llama", {"rope_parameters": {**YARN, "attention_factor": 1.3, "truncate": False}}),
    "llama-yarn-betas": ("Llama", {"rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-sliding": ("Mistral", {"sliding_window": 7, "head_dim": 32}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, "sliding_window": 9}),
    "qwen2-sliding-by-layer": ("Qwen2", SLIDING),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-sliding": ("Qwen3", SLIDING),
    "qwen3-biases": ("Qwen3", {"attention_bias": True}),
    "qwen3-yarn": ("Qwen3", {"rope_parameters": YARN}),
    "mixtral": ("Mixtral", {"num_local_experts": 5}),
    "mixtral-sliding": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 7}),
    "qwen2-moe": ("Qwen2Moe", {**QWEN3_MOE, "shared_expert_intermediate_size": 72, "head_dim": 16}),
    "qwen2-moe-own-width": (
        "Qwen2Moe",
        {**QWEN3_MOE, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "head_dim": 16},
    ),
    "qwen2-moe-sliding": (
        "Qwen2Moe",
        {
            **QWEN3_MOE,
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 2,
        },
    ),
    "qwen3-moe": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3-moe-some-layers": (
        "Qwen3Moe",
        {**QWEN3_MOE, "decoder_sparse_step": 2, "num_hidden_layers": 5, "head_dim": 32},
    ),
    "qwen3-moe-sliding": ("Qwen3Moe", {**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 7}),
    "qwen3-moe-dense-layers": ("Qwen3Moe", {**QWEN3_MOE, "mlp_only_layers": [1], "tie_word_embeddings": True}),
    "granite": ("Granite", GRANITE),
    "granite-tied": (
        "Granite",
        {**GRANITE, "tie_word_embeddings": True, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    ),
    "olmo2": ("Olmo2", {"num_key_value_heads": 4}),
    "olmo2-grouped": ("Olmo2", {"head_dim": 32, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "olmo2-yarn": ("Olmo2", {"rope_parameters": YARN, "attention_bias": True}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "smollm3-interval": ("SmolLM3", {"no_rope_layer_interval": 2, "num_hidden_layers": 5, "tie_word_embeddings": True}),
    "smollm3-sliding": (
        "SmolLM3",
        {"use_sliding_window": True, "sliding_window": 7, "no_rope_layers": [0, 1, 1], "num_key_value_heads": 1},
    ),
    "phi3": ("Phi3", {"num_key_value_heads": 4}),
    "phi3-sliding": ("Phi3", {"sliding_window": 7, "tie_word_embeddings": True}),
    "phi4-partial": ("Phi3", {"rope_parameters": {**PARTIAL, "rope_type": "default"}, "num_key_value_heads": 1}),
    "phi3-longrope": ("Phi3", LONGROPE),
    "phi4-longrope": ("Phi3", {**LONGROPE, "rope_parameters": {**LONG_FACTORS, **PARTIAL, **SIX}}),
    "opt": ("OPT", {}),
    "opt-no-biases": ("OPT", {"enable_bias": False, "tie_word_embeddings": False, "activation_function": "gelu"}),
    "opt-no-final-norm": ("OPT", {"_remove_final_layer_norm": True}),
    "opt-350m": ("OPT", {"do_layer_norm_before": False, "word_embed_proj_dim": 24}),
    "opt-350m-untied": (
        "OPT",
        {"do_layer_norm_before": False, "word_embed_proj_dim": 80, "tie_word_embeddings": False},
    ),
    "gemma2": ("Gemma2", GEMMA2),
    "gemma2-one-kv-head": ("Gemma2", {**GEMMA2, "num_key_value_heads": 1, "head_dim": 32}),
    "gemma2-listed": (
        "Gemma2",
        {**GEMMA2, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "gemma2-no-caps": (
        "Gemma2",
        {**GEMMA2, "final_logit_softcapping": None, "attn_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma3": ("Gemma3", {**GEMMA3, "num_hidden_layers": 7}),
    "gemma3-scaled": ("Gemma3", {**GEMMA3, "rope_parameters": GEMMA3_ROPES, "sliding_window_pattern": 2}),
    "gemma3-capped": ("Gemma3", {**GEMMA3, "final_logit_softcapping": 5.0, "num_key_value_heads": 1, "head_dim": 32}),
    "gemma4": ("Gemma4", {**GEMMA4, "attention_bias": True}),
    "gemma4-default-layers": ("Gemma4", {**GEMMA4, "num_hidden_layers": 7, "layer_types": None, "rms_norm_eps": 1e-4}),
    "gemma4-keys-are-values": ("Gemma4", GEMMA4_LARGE),
    "gemma4-shared-caches": ("Gemma4", GEMMA4_SMALL),
    "gemma4-experts": ("Gemma4", {**GEMMA4_LARGE, **GEMMA4_EXPERTS}),
    "gemma4-unified": ("Gemma4Unified", {k: v for k, v in GEMMA4_LARGE.items() if k != "hidden_size_per_layer_input"}),
    "gpt-oss": ("GptOss", GPT_OSS),
    "gpt-oss-listed": (
        "GptOss",
        {**GPT_OSS, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "swiglu_limit": 7.0},
    ),
    "gpt-oss-default-rope": ("GptOss", {**GPT_OSS, "rope_parameters": None, "num_key_value_heads": 1, "head_dim": 32}),
    "deepseek": ("DeepseekV3", DEEPSEEK),
    "deepseek-one-group": ("DeepseekV3", {**DEEPSEEK, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "deepseek-no-query-rank": ("DeepseekV3", {**DEEPSEEK, "q_lora_rank": None, "num_mtp_layers": 0}),
    "deepseek-shared": ("DeepseekV3", {**DEEPSEEK, "n_shared_experts": 3, "first_k_dense_replace": 0}),
    "deepseek-none-shared": ("DeepseekV3", {**DEEPSEEK, "n_shared_experts": 0, "num_mtp_layers": 2}),
    "deepseek-dense": ("DeepseekV3", {**DEEPSEEK, "first_k_dense_replace": 3, "tie_word_embeddings": True}),
    "deepseek-yarn": ("DeepseekV3", {**DEEPSEEK, **YARN_SCORES, "attention_bias": True}),
    "deepseek-in-halves": ("DeepseekV3", {**DEEPSEEK, "rope_interleave": False, "attention_bias": True}),
    "glm": ("Glm4MoeLite", GLM),
    "glm-listed": ("Glm4MoeLite", {**GLM, "mlp_layer_types": ["sparse", "dense", "sparse"], "rms_norm_eps": 1e-3}),
    "glm4-moe": ("Glm4Moe", {**GLM4_MOE, "use_qk_norm": True, "attention_bias": True}),
    "glm4-moe-air": ("Glm4Moe", {**GLM4_MOE, "n_shared_experts": 2, "n_group": 3, "topk_group": 2}),
    "glm4-moe-yarn": (
        "Glm4Moe",
        {**GLM4_MOE, "rope_parameters": {**YARN, "partial_rotary_factor": 0.75}, "norm_topk_prob": False},
    ),
    "minimax-m2": ("MiniMaxM2", MINIMAX),
    "minimax-m2-yarn": (
        "MiniMaxM2",
        {
            **MINIMAX,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "rope_parameters": {**YARN, "partial_rotary_factor": 0.75},
        },
    ),
    "olmo3": (
        "Olmo3",
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "olmo3-yarn": (
        "Olmo3",
        {
            **{
                "sliding_window": 7,
                "rope_parameters": OLMO3_ROPES,
                "attention_bias": True,
                "tie_word_embeddings": True,
            },
            "num_hidden_layers": 5,
        },
    ),
    "ministral3": ("Ministral3", {"rope_parameters": GROWING}),
    "ministral3-sliding": (
        "Ministral3",
        {"rope_parameters": GROWING, "sliding_window": 7, "head_dim": 32, "tie_word_embeddings": True},
    ),
    "ministral3-default": ("Ministral3", {"num_key_value_heads": 1}),
    "seed-oss": ("SeedOss", {"head_dim": 32, "attention_bias": True}),
    "seed-oss-all-biases": ("SeedOss", {"attention_out_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "exaone4": ("Exaone4", {"sliding_window": 7, "num_hidden_layers": 5}),
    "exaone4-small": (
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True},
    ),
    "hunyuan": ("HunYuanDenseV1", {"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}}),
    "hunyuan-plain": (
        "HunYuanDenseV1",
        {"attention_bias": True, "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True},
    ),
    "qwen3.5": ("Qwen3_5", DELTA_NETS),
    "qwen3.5-tied": ("Qwen3_5", {**DELTA_NETS, **DELTA_LISTED, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3.5-yarn": (
        "Qwen3_5",
        {
            **DELTA_NETS,
            "rope_parameters": {**YARN, "partial_rotary_factor": 0.5},
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
        },
    ),
    "qwen3.5-moe": ("Qwen3_5Moe", DELTA_EXPERTS),
    "qwen3.5-moe-listed": (
        "Qwen3_5Moe",
        {**DELTA_EXPERTS, **DELTA_LISTED, "tie_word_embeddings": True, "shared_expert_intermediate_size": 20},
    ),
    "qwen3-next": ("Qwen3Next", {**DELTA_EXPERTS, "mlp_only_layers": [1, 3]}),
    "qwen3-next-some-layers": (
        "Qwen3Next",
        {
            **DELTA_EXPERTS,
            **DELTA_LISTED,
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "rope_parameters": {**YARN, "partial_rotary_factor": 0.25},
        },
    ),
    "gpt-oss-no-biases": ("GptOss", {**GPT_OSS, "attention_bias": False, "tie_word_embeddings": True}),
}
