"""The families of language models that jspec reads: one entry for each transformers class.

An entry says what the class takes for keys that config.json lacks, which choices of ``ModelConfig`` the class fixes, and
how the rest is read. Names of tensors that are not Llama's stand in ``jspec.config.tensor_names``."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.huggingface import family_keys
from jspec.checkpoints.huggingface.family_keys import Choices
from jspec.checkpoints.huggingface.gemma4 import all_but_every_sixth, gemma4, read_gemma4_ropes
from jspec.checkpoints.huggingface.rope import (
    no_ropes,
    read_phi3_rope,
    read_ropes,
    read_ropes_by_attention,
    read_ropes_of_some_layers,
)
from jspec.checkpoints.huggingface.windows import (
    Slides,
    Windows,
    all_but_every_nth,
    always,
    from_a_layer_on,
    never,
    without_rotation,
)


@dataclasses.dataclass(frozen=True)
class Family:
    """How config.json of a transformers class is read.

    Attributes:
      models: the models that have this class, for readers of docs/guides/models.md.
      defaults: key -> what the class takes if config.json lacks the key.
      choices: the choices of ``ModelConfig`` that the class fixes whatever config.json says.
      keys: the usual name of a key -> what the class calls it.
      slides: which layers have an attention window if config.json does not list them.
      window_switch: whether they have it only if ``use_sliding_window`` is set.
      lists_windows: whether ``layer_types`` may say otherwise.
      biases: which attention projections have biases. ``none``, ``qkv``, or ``configured``: all four if the key
        ``attention_bias`` is true.
      mlp_bias: whether the key ``mlp_bias`` says that the MLP has biases.
      ropes: reads the fields ``rope`` and ``layer_ropes``, from config.json and the window of each layer.
      more: reads the choices that keys of the class's own decide.
      reads_quantization: the ``quant_method`` of a ``quantization_config`` that ``more`` reads.
      own_code: whether its checkpoints name Python code of their own (``auto_map``) that computes what the class does.
        jspec never runs it. Checkpoints of other families that ask for code are refused.
    """

    models: str
    defaults: Mapping[str, Any]
    choices: Choices = dataclasses.field(default_factory=dict)
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    slides: Slides = never
    window_switch: bool = False
    lists_windows: bool = False
    biases: Literal["none", "qkv", "configured"] = "none"
    mlp_bias: bool = False
    ropes: Callable[[Fields, Windows], Choices] = read_ropes
    more: Callable[[Fields], Choices] = family_keys.nothing_more
    reads_quantization: tuple[str, ...] = ()
    own_code: bool = False

    def key(self, usual: str) -> str:
        """What the class calls a key."""
        return self.keys.get(usual, usual)


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

_GEMMA4 = Family(
    "Gemma 4",
    {
        **{key: value for key, value in _GEMMA.items() if key != "query_pre_attn_scalar"},
        "vocab_size": 262144,
        "num_hidden_layers": 30,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
    },
    {"norm": "rms_wide", "norm_placement": "around", "qk_norm": True, "value_norm": True, "layer_scalars": True},
    keys={"hidden_act": "hidden_activation"},
    slides=all_but_every_sixth,
    lists_windows=True,
    biases="configured",
    ropes=read_gemma4_ropes,
    more=gemma4,
)
_WITHOUT_LAYER_INPUTS = {"hidden_size_per_layer_input": 0, "max_position_embeddings": 262144, "sliding_window": 1024}

_DEEPSEEK = {
    "qk_rope_head_dim": 64,
    "rope_interleave": True,
    "norm_topk_prob": True,
    "n_shared_experts": 1,
}

FAMILIES = {
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
    "MixtralForCausalLM": Family(
        "Mixtral 8x7B, 8x22B",
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        slides=always,
        more=family_keys.mixtral,
    ),
    "Qwen3MoeForCausalLM": Family(
        "Qwen3-30B-A3B, Qwen3-235B-A22B",
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_local_experts": 128,
        },
        {"qk_norm": True},
        slides=always,
        window_switch=True,
        biases="configured",
        more=family_keys.qwen3_moe,
    ),
    "GptOssForCausalLM": Family(
        "gpt-oss-20b, gpt-oss-120b",
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
        },
        {"norm": "rms_wide", "attention_sinks": True},
        slides=all_but_every_nth,
        lists_windows=True,
        biases="configured",
        more=family_keys.gpt_oss,
        reads_quantization=("mxfp4",),
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
    "Gemma4ForCausalLM": dataclasses.replace(_GEMMA4, models="Gemma 4: the text models of E2B, E4B, 26B-A4B and 31B"),
    "Gemma4UnifiedForCausalLM": dataclasses.replace(
        _GEMMA4, models="Gemma 4 12B: its text model", defaults={**_GEMMA4.defaults, **_WITHOUT_LAYER_INPUTS}
    ),
    "DeepseekV3ForCausalLM": Family(
        "DeepSeek-V3, DeepSeek-R1",
        {
            **_DEEPSEEK,
            "max_position_embeddings": 4096,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
        },
        biases="configured",
        more=family_keys.deepseek,
        own_code=True,
    ),
    "Glm4MoeLiteForCausalLM": Family(
        "GLM-4.7-Flash",
        {
            **_DEEPSEEK,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "kv_lora_rank": 512,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        biases="configured",
        more=family_keys.deepseek,
    ),
}

# The ``model_type`` of config.json -> the class that transformers reads it as, where ``architectures`` does not say.
MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "opt": "OPTForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
}
