"""Shapes of published checkpoints, with random weights: speed does not depend on what the weights are."""

import dataclasses
from typing import NamedTuple

from jspec.config import OF_TARGET, DeltaNets, Experts, Latent, LayerConfig, ModelConfig, Rope
from jspec.config.heads import (
    AssistantConfig,
    BlockConfig,
    Eagle3Config,
    EagleConfig,
    HeadConfig,
    MedusaConfig,
    MLPConfig,
    MTPConfig,
    mtp_layers,
)

DRAFT_VOCABULARY = 32_000  # of published EAGLE-3 heads

LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=131072,
    rope=Rope(theta=5e5, kind="llama3", factor=8.0, original_max_position=8192),
)
LLAMA_70B = dataclasses.replace(
    LLAMA_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64, windows=()
)
LLAMA_1B = dataclasses.replace(
    LLAMA_8B, hidden_size=2048, intermediate_size=8192, num_layers=16, head_dim=64, tie_embeddings=True, windows=()
)
QWEN3_06B = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    max_position=40960,
    rms_norm_eps=1e-6,
    rope=Rope(theta=1e6),
    qk_norm=True,
    tie_embeddings=True,
)
QWEN3_30B_A3B = dataclasses.replace(
    QWEN3_06B,
    architecture="Qwen3MoeForCausalLM",
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    tie_embeddings=False,
    windows=(),
    experts=Experts(128, 8, 768),
)
QWEN3_235B_A22B = dataclasses.replace(
    QWEN3_30B_A3B,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=94,
    num_heads=64,
    windows=(),
    experts=Experts(128, 8, 1536),
)

GLM_47_FLASH = ModelConfig(
    architecture="Glm4MoeLiteForCausalLM",
    vocab_size=154880,
    hidden_size=2048,
    intermediate_size=10240,
    num_layers=47,
    num_heads=20,
    num_kv_heads=20,
    head_dim=256,
    max_position=202752,
    rope=Rope(theta=1e6),
    latent=Latent(512, 64, 256, 768),
    experts=Experts(64, 4, 1536, layers=(False, *[True] * 46), scores="sigmoid", scale=1.8, corrected=True, shared=1),
    mtp_layers=1,
)


def gpt_oss(num_layers: int, num_experts: int) -> ModelConfig:
    """The shape of gpt-oss: 24 layers and 32 experts of the 20b, 36 and 128 of the 120b."""
    return ModelConfig(
        architecture="GptOssForCausalLM",
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_layers=num_layers,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        max_position=131072,
        rope=Rope(
            theta=150_000.0,
            kind="yarn",
            factor=32.0,
            original_max_position=4096,
            attention_factor=1.3465735902799727,
            truncate=False,
        ),
        qkv_bias=True,
        output_bias=True,
        windows=tuple(None if layer % 2 else 128 for layer in range(num_layers)),
        norm="rms_wide",
        attention_sinks=True,
        experts=Experts(num_experts, 4, 2880, biases=True, clamp=7.0, stored="mxfp4"),
    )


def gemma4(
    num_layers: int, hidden_size: int, width: int, heads: tuple[int, int, int], experts: Experts | None = None
) -> ModelConfig:
    """The shape of a large Gemma 4, whose every sixth layer has full attention, with keys for values.

    Args:
      num_layers, hidden_size, width: L, D and F.
      heads: N, and G of layers with a window and of those without.
      experts: beside the MLP.
    """
    N, G, full_G = heads
    full = [layer % 6 == 5 for layer in range(num_layers)]
    window, all_pairs = Rope(theta=1e4), Rope(theta=1e6, kind="proportional", fraction=0.25)
    return ModelConfig(
        architecture="Gemma4ForCausalLM",
        vocab_size=262144,
        hidden_size=hidden_size,
        intermediate_size=width,
        num_layers=num_layers,
        num_heads=N,
        num_kv_heads=G,
        head_dim=256,
        max_position=262144,
        rms_norm_eps=1e-6,
        rope=all_pairs,
        layer_ropes=tuple(all_pairs if whole else window for whole in full),
        tie_embeddings=True,
        qk_norm=True,
        value_norm=True,
        windows=tuple(None if whole else 1024 for whole in full),
        norm="rms_wide",
        norm_placement="around",
        activation="gelu_tanh",
        attention_scale=1.0,
        logit_softcap=30.0,
        embedding_multiplier=hidden_size**0.5,
        layer_scalars=True,
        experts=experts,
        layers=tuple(
            LayerConfig(512, full_G, width, keys_are_values=True) if whole else LayerConfig(256, G, width)
            for whole in full
        ),
    )


def qwen3_5(
    num_layers: int,
    hidden_size: int,
    width: int,
    heads: tuple[int, int],
    value_heads: int,
    experts: Experts | None = None,
    vocab_size: int = 248320,
) -> ModelConfig:
    """The shape of a Qwen3.5 or 3.6, of which three of four layers have gated delta nets.

    Args:
      num_layers, hidden_size, width: L, D and F.
      heads: N and G of the layers with attention.
      value_heads: Nv of the others.
      experts: in every layer, in place of the MLP.
      vocab_size: V.
    """
    return ModelConfig(
        architecture="Qwen3_5ForCausalLM" if experts is None else "Qwen3_5MoeForCausalLM",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=width,
        num_layers=num_layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=256,
        max_position=262144,
        rms_norm_eps=1e-6,
        rope=Rope(theta=1e7, fraction=0.25),
        qk_norm=True,
        norm="rms_offset",
        attention_gate=True,
        experts=experts,
        delta_nets=DeltaNets(
            16, value_heads, 128, 128, taps=4, layers=tuple(layer % 4 != 3 for layer in range(num_layers))
        ),
        mtp_layers=1,
    )


QWEN36_27B = qwen3_5(64, 5120, 17408, (24, 4), 48)
QWEN36_35B_A3B = qwen3_5(40, 2048, 512, (16, 2), 32, Experts(256, 8, 512, shared=1, shared_gate=True))
GEMMA4_31B = gemma4(60, 5376, 21504, (32, 16, 4))
GEMMA4_26B_A4B = gemma4(30, 2816, 2112, (16, 8, 2), Experts(128, 8, 704, beside_mlp=True))
MISTRAL_SMALL_24B = dataclasses.replace(
    LLAMA_8B,
    architecture="MistralForCausalLM",
    vocab_size=131072,
    hidden_size=5120,
    intermediate_size=32768,
    num_layers=40,
    rope=Rope(theta=1e9),
    windows=(),
)
SEED_OSS_36B = dataclasses.replace(
    LLAMA_8B,
    architecture="SeedOssForCausalLM",
    vocab_size=155136,
    hidden_size=5120,
    intermediate_size=27648,
    num_layers=64,
    num_heads=80,
    max_position=524288,
    rope=Rope(theta=1e7),
    qkv_bias=True,
    windows=(),
)
GPT_OSS_20B, GPT_OSS_120B = gpt_oss(24, 32), gpt_oss(36, 128)
TINY = dataclasses.replace(
    LLAMA_8B,
    vocab_size=211,
    hidden_size=32,
    intermediate_size=48,
    num_layers=7,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    windows=(),
)


TINY_DRAFT = dataclasses.replace(TINY, num_layers=2, tie_embeddings=True, windows=())
TINY_MIXTURE = dataclasses.replace(
    gpt_oss(7, 8),
    vocab_size=211,
    hidden_size=64,
    intermediate_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    windows=(8, None, 8, None, 8, None, 8),
    experts=Experts(8, 2, 32, biases=True, clamp=7.0, stored="mxfp4"),
)


TINY_LATENT = dataclasses.replace(
    GLM_47_FLASH,
    vocab_size=211,
    hidden_size=64,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=4,
    head_dim=24,
    windows=(),
    latent=Latent(16, 16, 8, 24),
    experts=Experts(8, 2, 32, layers=(False, True, True), scores="sigmoid", corrected=True, shared=1),
)


TINY_HYBRID = dataclasses.replace(
    qwen3_5(4, 32, 48, (4, 2), 16, vocab_size=211),
    head_dim=8,
    delta_nets=DeltaNets(2, 4, 8, 8, taps=4, layers=(True, True, True, False)),
)


class Pair(NamedTuple):
    """A target and the smaller model that drafts for it."""

    target: ModelConfig
    draft: ModelConfig


SHAPES = {
    "llama-3.1-8b": Pair(LLAMA_8B, LLAMA_1B),
    "llama-3.3-70b": Pair(LLAMA_70B, LLAMA_8B),
    "qwen3-30b-a3b": Pair(QWEN3_30B_A3B, QWEN3_06B),
    "qwen3-235b-a22b": Pair(QWEN3_235B_A22B, QWEN3_06B),
    "gpt-oss-20b": Pair(GPT_OSS_20B, dataclasses.replace(LLAMA_1B, vocab_size=201088)),  # no smaller one is published
    "glm-4.7-flash": Pair(GLM_47_FLASH, dataclasses.replace(LLAMA_1B, vocab_size=154880)),
    "gemma-4-31b": Pair(GEMMA4_31B, dataclasses.replace(LLAMA_1B, vocab_size=262144)),
    "gemma-4-26b-a4b": Pair(GEMMA4_26B_A4B, dataclasses.replace(LLAMA_1B, vocab_size=262144)),
    "mistral-small-24b": Pair(MISTRAL_SMALL_24B, dataclasses.replace(LLAMA_1B, vocab_size=131072)),
    "seed-oss-36b": Pair(SEED_OSS_36B, dataclasses.replace(LLAMA_1B, vocab_size=155136)),
    "qwen3.6-27b": Pair(QWEN36_27B, dataclasses.replace(LLAMA_1B, vocab_size=248320)),
    "qwen3.6-35b-a3b": Pair(QWEN36_35B_A3B, dataclasses.replace(LLAMA_1B, vocab_size=248320)),
    "gpt-oss-120b": Pair(GPT_OSS_120B, GPT_OSS_20B),
    "tiny": Pair(TINY, TINY_DRAFT),
    "tiny-hybrid": Pair(TINY_HYBRID, TINY_DRAFT),
    "tiny-latent": Pair(TINY_LATENT, TINY_DRAFT),
    "tiny-mixture": Pair(TINY_MIXTURE, TINY_DRAFT),
}


def head_for(target: ModelConfig, method: str) -> HeadConfig:
    """The configuration of a draft head for ``target``, of the proportions of published ones."""
    if method == "mtp":
        return MTPConfig(mtp_layers(target, 1))
    D, V = target.hidden_size, target.vocab_size
    Vd = min(DRAFT_VOCABULARY, V // 2)
    # Published heads are of Llama's architecture, whatever their target's is.
    dense = {"architecture": "LlamaForCausalLM", "experts": None, "attention_sinks": False, "norm": "rms"}
    plain = {"rope": Rope(theta=target.rope.theta), "qkv_bias": False, "output_bias": False, "qk_norm": False}
    if method == "assistant":
        return assistant_of(target)
    if target.layers:
        layers = {"layers": (), "layer_ropes": (), "value_norm": False, "layer_scalars": False, "head_dim": 128}
        plain |= {**layers, "norm_placement": "before", "attention_scale": None, "activation": "silu"}
    if target.experts is not None or target.layers:
        target = dataclasses.replace(target, intermediate_size=6 * D, **dense, **plain)
    floats = {"windows": (), "quantization": None, "other_formats": ()}
    one, four, five = (dataclasses.replace(target, num_layers=n, **floats) for n in (1, 4, 5))
    five = dataclasses.replace(five, architecture="Qwen3ForCausalLM", qk_norm=True)
    L, drafts = target.num_layers, 7
    aux_layers = tuple(sorted({round(1 + (L - 4) * i / 4) + 1 for i in range(5)})) if L > 8 else (1, 2)
    return {
        "eagle": EagleConfig(one),
        "eagle3": Eagle3Config(one, draft_vocab_size=Vd, target_hidden_size=D),
        "parallel": Eagle3Config(four, draft_vocab_size=Vd, target_hidden_size=D, mask_token_id=0),
        "mlp": MLPConfig(V, D, inner_size=3 * D // 4, num_stages=4, tied=True, scale_input=True),
        "medusa": MedusaConfig(V, D, num_heads=8),
        "dflash": BlockConfig(five, V, D, aux_layers, drafts + 1, 0, False, (False,) * 5),
        "dspark": BlockConfig(
            five, V, D, aux_layers, drafts, 0, True, (False,) * 5, "vanilla", min(256, D // 2), "markov"
        ),
    }[method]


def assistant_of(target: ModelConfig) -> AssistantConfig:
    """An assistant of four layers that are 1024 wide, three of them with a window. Its MLP and heads are guessed."""
    kinds = [i for i in (0, 0, 0, 5) if target.layers]
    layers = [dataclasses.replace(target.layer(i), intermediate_size=4096, reads_cache_of=OF_TARGET) for i in kinds]
    own = dataclasses.replace(
        target,
        hidden_size=1024,
        num_layers=len(kinds),
        windows=tuple(target.windows[i] for i in kinds),
        layer_ropes=tuple(target.rope_of(i) for i in kinds),
        layers=tuple(dataclasses.replace(layer, keys_are_values=False) for layer in layers),
        experts=None,
        logit_softcap=None,
        embedding_multiplier=1.0,
        tie_embeddings=False,
    )
    return AssistantConfig(own, target.hidden_size)
