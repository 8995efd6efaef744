"""Public drafters as their publishers write them, in tiny sizes: for tests, and for docs/results/published-heads.md.

Each has the keys of config.json and the tensors that the publisher's code writes; its sizes are small, and those that are
unequal in the published drafter are unequal here. The files on the hub themselves were not read."""

import json
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from golden_blocks import checkpoint, golden
from mtp_checkpoints import with_layers
from resaved import resave
from safetensors.numpy import load_file, save_file
from tiny_heads import (
    NO_EMBEDDING,
    deepspec_eagle3,
    eagle,
    eagle3,
    medusa,
    mlp_speculator,
    p_eagle,
    pard,
    speculators,
)

EAGLE_REPO = "https://github.com/SafeAILab/EAGLE/tree/cb7e0841"
SPECFORGE = "https://github.com/sgl-project/SpecForge/blob"
SPECULATORS = "https://github.com/vllm-project/speculators/tree/c05b95b3"
DEEPSPEC = "https://github.com/deepseek-ai/DeepSpec/tree/afdfa7c"
MODEL_OPTIMIZER = "https://github.com/NVIDIA/Model-Optimizer/tree/5a4242fa"
MODEL_OPTIMIZER_PULL = "https://github.com/NVIDIA/Model-Optimizer/pull"
Z_LAB = "https://github.com/z-lab/dflash/blob"
PARD_REPO = "https://github.com/AMD-AGI/PARD/tree/6f279bf"
STATED_BY_FILE = "as the file says"

# Of gpt-oss, where the heads of the attention together are wider than the hidden states.
WIDE = {"head_dim": 24, "intermediate_size": 160}
MODELOPT = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


class Page(NamedTuple):
    """What is public of a head, and is no part of a tiny one.

    Attributes:
      source: a link to what describes it, or to the code that wrote it.
      kind: of drafter.
      target: the model that it drafts for.
      vocabulary: how many tokens it drafts, and of how many if they are not all.
    """

    source: str
    kind: str
    target: str
    vocabulary: str


class Public(NamedTuple):
    """A published head.

    Attributes:
      names: of the repositories that have it in this form.
      target: the architecture of its target.
      write: ``(folder, **keys)``, which writes it.
      keys: of its config.json.
      said: what whoever loads it has to say, because config.json does not.
      reads: the layers whose outputs it reads; none for the hidden states behind the final norm.
      page: what docs/results/published-heads.md says of it.
    """

    names: str
    target: str
    write: Callable[..., Path]
    keys: dict[str, Any]
    said: dict[str, Any]
    reads: tuple[int, ...]
    page: Page


def ids(*layers: int, **more) -> dict[str, Any]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True, **more}}


PUBLIC = [
    Public(
        "yuhuili/EAGLE-mixtral-instruct-8x7B",
        "MixtralForCausalLM",
        eagle,  # multi-head attention and rope_theta 1e4, unlike its target
        {"num_key_value_heads": None, "rms_norm_eps": 1e-6, **NO_EMBEDDING},
        {},
        (),
        Page(EAGLE_REPO, "EAGLE", "Mixtral 8x7B", "32,000"),
    ),
    Public(
        "AngelSlim/Qwen3-a3B_eagle3, Tengyunw/qwen3_30b_moe_eagle3",
        "Qwen3MoeForCausalLM",
        eagle3,
        {"architectures": ["LlamaForCausalLMEagle3"], "head_dim": 24, "rope_theta": 1e6, **NO_EMBEDDING},
        {},
        (2, 4, 5),
        Page("https://github.com/wejoncy/sfllm/pull/32", "EAGLE-3", "Qwen3-30B-A3B", STATED_BY_FILE),
    ),
    Public(
        "lmsys/Qwen3-235B-A22B-EAGLE3",
        "Qwen3MoeForCausalLM",
        eagle3,
        {**ids(1, 2, 4), "head_dim": 24, **NO_EMBEDDING},
        {},
        (2, 3, 5),
        Page(f"{SPECFORGE}/cbb0d956/configs/qwen3-235B-A22B-eagle3.json", "EAGLE-3", "Qwen3-235B-A22B", STATED_BY_FILE),
    ),
    Public(
        "nvidia/Qwen3-235B-A22B-Eagle3",
        "Qwen3MoeForCausalLM",
        eagle3,
        {**ids(1, 2, 4, **MODELOPT), "rope_scaling": LLAMA3, **NO_EMBEDDING},
        {},  # Model Optimizer collects what the layers return
        (2, 3, 5),
        Page(MODEL_OPTIMIZER, "EAGLE-3", "Qwen3-235B-A22B", STATED_BY_FILE),
    ),
    Public(
        "lmsys/EAGLE3-gpt-oss-120b-bf16",
        "GptOssForCausalLM",
        eagle3,
        {**ids(1, 2, 4), **WIDE, **NO_EMBEDDING},
        {},
        (2, 3, 5),
        Page(f"{SPECFORGE}/94d67101/specforge/core/eagle3.py", "EAGLE-3", "gpt-oss-120b", "32,000 of 201,088"),
    ),
    Public(
        "nvidia/gpt-oss-120b-Eagle3-v3",
        "GptOssForCausalLM",
        eagle3,
        {**ids(4, 6, 8, **MODELOPT, norm_before_fc=True), **WIDE, "rope_scaling": LLAMA3, **NO_EMBEDDING},
        {"aux_convention": "input_of"},
        (4, 6, 8),  # the last is what the final norm reads
        Page("https://github.com/sgl-project/sglang/pull/32334", "EAGLE-3", "gpt-oss-120b", STATED_BY_FILE),
    ),
    Public(
        "nvidia/gpt-oss-120b-Eagle3-short-context, -v2",
        "GptOssForCausalLM",
        eagle3,
        {"eagle_config": {"use_aux_hidden_state": False, **MODELOPT}, **WIDE, **NO_EMBEDDING},
        {},
        (),
        Page(MODEL_OPTIMIZER, "EAGLE-3", "gpt-oss-120b", STATED_BY_FILE),
    ),
    Public(
        "RedHatAI/gpt-oss-20b-speculator.eagle3",
        "GptOssForCausalLM",
        speculators,
        {"norm_before_residual": True, "layers": WIDE},
        {},
        (2, 4, 5),
        Page(SPECULATORS, "EAGLE-3", "gpt-oss-20b", STATED_BY_FILE),
    ),
    Public(
        "Dogacel/specdrift-gpt-oss-20b-eagle3, -120b-eagle3",
        "GptOssForCausalLM",
        eagle3,
        {**WIDE, "norm_output": True, **NO_EMBEDDING},
        {"norm_output": "recycled"},
        (2, 4, 5),
        Page("https://github.com/vllm-project/vllm/pull/42764", "EAGLE-3.1", "gpt-oss-20b, -120b", STATED_BY_FILE),
    ),
    Public(
        "amazon/GPT-OSS-20B-P-EAGLE, gpt-oss-120b-p-eagle",
        "GptOssForCausalLM",
        p_eagle,
        {**WIDE, "num_hidden_layers": 4},
        {},
        (2, 4, 5),
        Page("https://huggingface.co/amazon/gpt-oss-20b-p-eagle", "P-EAGLE", "gpt-oss-20b, -120b", STATED_BY_FILE),
    ),
    Public(
        "deepseek-ai/eagle3_qwen3_4b_ttt7, _8b_ttt7, _14b_ttt7",
        "Qwen3ForCausalLM",
        deepspec_eagle3,  # which says what its layer ids mean by the key that it has for them
        {},
        {},
        (1, 2, 3, 5, 6),
        Page(DEEPSPEC, "EAGLE-3", "Qwen3-4B, -8B, -14B", "151,936"),
    ),
    Public(
        "heads of the speculators package for Gemma",
        "Gemma3ForCausalLM",
        speculators,
        {"draft_vocab_size": 97},
        {},
        (2, 4, 5),
        Page(SPECULATORS, "EAGLE-3", "Gemma 3", STATED_BY_FILE),
    ),
]


class Recognised(NamedTuple):
    """A published drafter of which it is tried what jspec makes of its files.

    Attributes:
      names: of the repositories that have it in this form.
      write: ``(folder)``, which writes it.
      page: as of ``Public``.
      said: what whoever loads it says.
    """

    names: str
    write: Callable[[Path], Any]
    page: Page
    said: Mapping[str, Any] = types.MappingProxyType({})


def _assistant(folder: Path):
    from assistant_checkpoints import CLUSTERED, assistant_of

    assistant_of(folder, "small", **CLUSTERED)


def _mimo(folder: Path):
    checkpoint(folder, "dflash")
    (folder / "mask_embedding.pt").write_bytes(b"")


def _dflash(folder: Path, **keys):
    settings = json.loads(str(golden("dflash")["config_json"]))["dflash_config"]
    return checkpoint(folder, "dflash", dflash_config={**settings, **keys})


def _dflash2(folder: Path, **more):
    """With a window in each layer, as z-lab, incoai and SpecForge have it."""
    config = json.loads(str(golden("dflash2")["config_json"]))
    config |= {"is_causal": False, "layer_types": ["sliding_attention"] * 2, "sliding_window": 6}
    config["dflash_config"] |= more
    checkpoint(folder, "dflash", block_size=None, **config)
    weights = {name.removeprefix("w."): array for name, array in golden("dflash2").items() if name.startswith("w.")}
    save_file(load_file(folder / "model.safetensors") | weights, folder / "model.safetensors")


def _muse(folder: Path):
    keys = {"target_layer_ids": [1, 4, 6], "mask_token_id": 96, "dflash_config": ...}
    resave(
        checkpoint(folder, "dflash"),
        lambda name: name.replace("fc.", "encoder.fc.").replace("hidden_norm.", "encoder.output_norm_enc."),
        architectures=["MuseGlimmerAssistantModel"],
        model_type="muse_glimmer_assistant",
        **keys,
    )


def _mla(folder: Path):
    keys = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "model_type": "kimi_k2",
    }
    return eagle3(folder, **keys, **NO_EMBEDDING)


def _tied(folder: Path):
    return mlp_speculator(folder, n_predict=4, tie_weights=True, scale_input=True, top_k_tokens_per_head=[4, 3, 2, 2])


def _hydra(folder: Path):
    return medusa(folder, hydra_num_heads=3, hydra_num_layers=1, hydra_head_arch="mlp", grounded_heads=True)


RECOGNISED = [
    Recognised(
        "yuhuili/EAGLE-Vicuna-7B-v1.3, -13B-v1.3",
        lambda folder: eagle(folder, num_key_value_heads=None, rms_norm_eps=1e-6),
        Page(EAGLE_REPO, "EAGLE", "Vicuna 7B, 13B", "32,000"),
    ),
    Recognised(
        "yuhuili/EAGLE-LLaMA3-Instruct-8B, -70B",
        lambda folder: eagle(folder, bias=False, rope_theta=5e5),
        Page(EAGLE_REPO, "EAGLE", "Llama-3-8B, -70B", "128,256"),
    ),
    Recognised(
        "EAGLE heads of NeMo Automodel",
        lambda folder: checkpoint(folder, "nemo_automodel/llama"),
        Page(
            "https://github.com/NVIDIA-NeMo/Automodel/blob/4952259c/nemo_automodel/components/speculative/eagle/draft_llama_v12.py",
            "EAGLE with norms",
            "Llama, Phi-3, Qwen3, Qwen3-MoE",
            "the target's",
        ),
    ),
    Recognised(
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        lambda folder: eagle3(folder, architectures=["LlamaForCausalLM"], max_position_embeddings=64, **NO_EMBEDDING),
        Page(EAGLE_REPO, "EAGLE-3", "Llama-3.1-8B", "32,000 of 128,256"),
    ),
    Recognised(
        "RedHatAI/Qwen3-8B-speculator.eagle3, Llama-3.1-8B-Instruct-speculator.eagle3",
        speculators,
        Page(SPECULATORS, "EAGLE-3", "Qwen3-8B, Llama-3.1-8B", STATED_BY_FILE),
    ),
    Recognised(
        "nvidia/gpt-oss-120b-Eagle3-long-context",
        lambda folder: eagle3(folder, **ids(1, 3, 7, **MODELOPT, norm_before_fc=True), **WIDE, **NO_EMBEDDING),
        Page("https://github.com/sgl-project/sglang", "EAGLE-3", "gpt-oss-120b", STATED_BY_FILE),
    ),
    Recognised(
        "lightseekorg's heads for Kimi-K2.5 and K2.6",
        _mla,
        Page(
            "https://github.com/vllm-project/vllm", "EAGLE-3 with latent attention", "Kimi-K2.5, K2.6", STATED_BY_FILE
        ),
    ),
    Recognised(
        "amd/PARD-Llama-3.2-1B, PARD-Qwen2.5-0.5B, PARD-Qwen3-0.6B",
        pard,
        Page(PARD_REPO, "PARD", "Llama 3, Qwen2.5, Qwen3", "the target's"),
    ),
    Recognised(
        "amd/PARD2-Llama-3.1-8B, PARD2-Qwen3-8B, PARD2-Qwen3-14B",
        lambda folder: pard(folder, pard2=True, pard2_target_dim=64, pard2_scale=0.02),
        Page(PARD_REPO, "PARD-2", "Llama-3.1-8B, Qwen3-8B, -14B", "the target's"),
    ),
    Recognised(
        "FasterDecoding/medusa-vicuna-7b-v1.3, -13b-v1.3, -33b-v1.3",
        lambda folder: medusa(folder, medusa_num_heads=2, file="medusa_lm_head.pt"),
        Page("https://github.com/FasterDecoding/Medusa/tree/e2a5d20", "Medusa", "Vicuna 7B, 13B, 33B", "32,000"),
    ),
    Recognised(
        "ankner/hydra-vicuna heads",
        _hydra,
        Page("https://github.com/zankner/Hydra", "Hydra", "Vicuna", "32,000"),
    ),
    Recognised(
        "ibm-fms/llama-13b-accelerator",
        mlp_speculator,
        Page(
            "https://github.com/foundation-model-stack/fms-extras/tree/16339f7",
            "MLP speculator",
            "Llama-2-13B",
            "32,000",
        ),
    ),
    Recognised(
        "ibm-fms/llama3-70b-accelerator",
        _tied,
        Page(
            "https://github.com/foundation-model-stack/fms-extras/tree/16339f7",
            "MLP speculator",
            "Llama-3-70B",
            "128,256",
        ),
    ),
    Recognised(
        "z-lab/Qwen3-8B-DFlash-b16",
        lambda folder: checkpoint(folder, "dflash"),
        Page("https://github.com/z-lab/dflash/tree/44947fb", "DFlash", "Qwen3-8B", "151,936"),
    ),
    Recognised(
        "z-lab/Qwen3.6-35B-A3B-DFlash",
        lambda folder: checkpoint(
            folder, "dflash", layer_types=["sliding_attention", "full_attention"], sliding_window=6
        ),
        Page("https://github.com/ikawrakow/ik_llama.cpp/pull/2021", "DFlash", "Qwen3.6-35B-A3B", STATED_BY_FILE),
    ),
    Recognised(
        "SpecForge's DFlash2 heads for Qwen3.6-27B",
        _dflash2,
        Page(f"{SPECFORGE}/5943b2f6/configs/qwen3.6-27b-dflash2.json", "DFlash2", "Qwen3.6-27B", "248,320"),
    ),
    Recognised(
        "incoai/Muse-Glimmer-30B-DFlash2",
        lambda folder: _dflash2(folder, final_logit_softcapping=20.0, output_multiplier=0.196),
        Page(f"{Z_LAB}/0a7587c0/tests/fixtures/dflash2-config.json", "DFlash2", "Muse-Glimmer-30B", "202,048"),
    ),
    Recognised(
        "meta-models/Muse-Glimmer-30B-assistant",
        _muse,
        Page(f"{Z_LAB}/0a7587c0/tests/fixtures/assistant-config.json", "DFlash", "Muse-Glimmer-30B", "the target's"),
    ),
    Recognised(
        "heads of Model Optimizer with windows",
        lambda folder: checkpoint(folder, "model_optimizer/windows"),
        Page(f"{MODEL_OPTIMIZER_PULL}/1960", "DFlash", "any", "the target's"),
    ),
    Recognised(
        "SpecForge's Domino heads for Qwen3-8B",
        lambda folder: checkpoint(folder, "model_optimizer/domino"),
        Page(f"{SPECFORGE}/70e241ae/configs/qwen3-8b-domino.json", "Domino", "Qwen3-8B", "151,936"),
    ),
    Recognised(
        "heads of Model Optimizer with LiLiCorr",
        lambda folder: checkpoint(folder, "model_optimizer/lilicorr"),
        Page(f"{MODEL_OPTIMIZER_PULL}/2342", "LiLiCorr", "any", "the target's"),
    ),
    Recognised(
        "DSpark heads of Model Optimizer",
        lambda folder: checkpoint(folder, "model_optimizer/dspark-gated"),
        Page(
            "https://github.com/NVIDIA/Model-Optimizer/blob/82657682/modelopt/torch/speculative/plugins/hf_dspark.py",
            "DSpark",
            "any",
            "the target's",
        ),
    ),
    Recognised(
        "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16-DSpark",
        lambda folder: checkpoint(
            folder, "dspark", "vanilla", dflash_config={"causal": True, "attention_sink_bias": True}
        ),
        Page(f"{MODEL_OPTIMIZER_PULL}/2149", "DSpark", "Nemotron-3.5-Lightning-30B-A3B", STATED_BY_FILE),
    ),
    Recognised(
        "XPress heads of the speculators package",
        lambda folder: checkpoint(folder, "xpress/windows"),
        Page(
            "https://github.com/vllm-project/speculators/tree/3324c5f1/src/speculators/models/xpress",
            "XPress",
            "any",
            STATED_BY_FILE,
        ),
    ),
    Recognised(
        "XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash",
        _mimo,
        Page("https://github.com/vllm-project/vllm/pull/46104", "DFlash", "MiMo-V2.5-Pro", STATED_BY_FILE),
    ),
    Recognised(
        "jetspec-qwen3-8b",
        lambda folder: _dflash(folder, causal_head=True),
        Page("https://github.com/hao-ai-lab/JetSpec/tree/2c7b3fa", "JetSpec", "Qwen3-8B", "151,936"),
    ),
    Recognised(
        "deepseek-ai/dspark_qwen3_8b_block7",
        lambda folder: checkpoint(folder, "dspark", "vanilla"),
        Page(DEEPSPEC, "DSpark", "Qwen3-8B", "151,936"),
    ),
    Recognised(
        "DeepSpec's heads for Gemma 4",
        lambda folder: checkpoint(folder, "dspark", "vanilla", architectures=["Gemma4DSparkModel"]),
        Page(DEEPSPEC, "DSpark", "Gemma 4", "the target's"),
    ),
    Recognised(
        "google/gemma-4-E2B-it-assistant, -E4B-it-assistant",
        _assistant,
        Page("https://ai.google.dev/gemma/docs/mtp/mtp", "assistant", "Gemma 4 E2B, E4B", "the target's"),
    ),
    Recognised(
        "deepseek-ai/DeepSeek-V3, DeepSeek-R1",
        lambda folder: with_layers(folder, "DeepseekV3ForCausalLM"),
        Page("https://github.com/deepseek-ai/DeepSeek-V3", "MTP, in the target", "itself", "the target's"),
        {"mtp": True},
    ),
    Recognised(
        "zai-org/GLM-4.7-Flash",
        lambda folder: with_layers(folder, "Glm4MoeLiteForCausalLM"),
        Page(
            "https://github.com/huggingface/transformers/tree/v5.24.0", "MTP, in the target", "itself", "the target's"
        ),
        {"mtp": True},
    ),
    Recognised(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        lambda folder: with_layers(folder, "Qwen3NextForCausalLM"),
        Page("https://github.com/vllm-project/vllm", "MTP, in the target", "itself", "the target's"),
        {"mtp": True},
    ),
]
EVERY = [
    *(Recognised(one.names, lambda folder, one=one: one.write(folder, **one.keys), one.page) for one in PUBLIC),
    *RECOGNISED,
]
