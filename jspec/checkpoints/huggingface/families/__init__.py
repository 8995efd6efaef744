"""The families of language models that jspec reads: one entry for each transformers class.

family.py       what an entry says
dense.py        families whose layers have an MLP
mixtures.py     families whose layers have a mixture of experts
gemma4.py       Gemma 4, whose layers differ
hybrids.py      families with gated delta nets in most layers
family_keys.py  keys of config.json that only some families have

An entry says what the class takes for keys that config.json lacks, which choices of ``ModelConfig`` the class fixes, and
how the rest is read. Names of tensors that are not Llama's stand in ``jspec.config.tensor_names``."""

from jspec.checkpoints.huggingface.families.dense import DENSE
from jspec.checkpoints.huggingface.families.family import Family as Family
from jspec.checkpoints.huggingface.families.gemma4 import GEMMA4
from jspec.checkpoints.huggingface.families.hybrids import HYBRIDS
from jspec.checkpoints.huggingface.families.mixtures import MIXTURES

FAMILIES: dict[str, Family] = {**DENSE, **MIXTURES, **GEMMA4, **HYBRIDS}

# The ``model_type`` of config.json -> the class that transformers reads it as, where ``architectures`` does not say.
MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "opt": "OPTForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
}
