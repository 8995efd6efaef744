"""Tiny draft heads of every kind for the target in ``engines.py``, with random weights or trained to agree with it."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from causal_heads import causal_drafts
from engines import CONFIG, DRAFT, LATENTS, MAX_LEN, TARGET, V, plain_greedy, ragged_prompts, shared, target
from flax import nnx

from jspec.config import OF_TARGET, LayerConfig, Speculation
from jspec.config.heads import (
    AssistantConfig,
    BlockConfig,
    Eagle3Config,
    EagleConfig,
    HeadConfig,
    MedusaConfig,
    MLPConfig,
    MTPConfig,
    PardConfig,
)
from jspec.config.heads.block_corrections import DominoConfig, LiLiCorrConfig
from jspec.drafting.methods import drafter_for
from jspec.engine.decoding import Decoding
from jspec.engine.engine import Engine
from jspec.models import build_head, flat_params
from jspec.models.flatten import flatten
from jspec.models.quantization import quantize
from jspec.quantization.weight import Weight

D, REDUCED = TARGET.hidden_size, 20
LAYER = dataclasses.replace(TARGET, num_layers=1, windows=())
LAYERS = dataclasses.replace(TARGET, num_layers=2, windows=(None, 9))
MASK = 5
_OF_TARGET = LayerConfig(TARGET.head_dim, TARGET.num_kv_heads, 20, reads_cache_of=OF_TARGET)
ASSISTANT = dataclasses.replace(
    TARGET,
    architecture="Gemma4ForCausalLM",
    hidden_size=12,
    num_layers=2,
    windows=(3, None),
    qk_norm=True,
    norm="rms_wide",
    norm_placement="around",
    layer_scalars=True,
    layers=(_OF_TARGET, _OF_TARGET),
)
BLOCK = dataclasses.replace(
    TARGET, architecture="Qwen3ForCausalLM", num_layers=2, windows=(None, 9), qk_norm=True, max_position=MAX_LEN
)

CONVOLVED = {"conv_taps": 2, "conv_group": 4, "selector_rank": 6, "candidates": 5}  # of a DFlash2 head
REFINED = {"refiner_rank": 6, "refiner_ratio": 2, "refine_passes": 2}  # of an XPress head

LILICORR = LiLiCorrConfig(12, num_layers=2, num_heads=3, inner_size=18, factor_size=6, scale=5.0, eps=1e-3)

HEADS: dict[str, HeadConfig] = {
    "eagle": EagleConfig(LAYERS, fuse_bias=True),
    "mtp": MTPConfig(LAYER),
    "eagle3": Eagle3Config(LAYER, REDUCED, D, 3, aux_layers=(0, 1, 3)),
    "p-eagle": Eagle3Config(LAYERS, REDUCED, D, 2, aux_layers=(1, 3), mask_token_id=MASK),
    "pard": PardConfig(DRAFT, MASK),
    "mlp": MLPConfig(V, D, 24, 4),
    "medusa": MedusaConfig(V, D, 4),
    "dflash": BlockConfig(BLOCK, V, D, (0, 2, 3), 5, MASK, False, (False, True)),
    "dspark": BlockConfig(
        BLOCK, REDUCED, D, (1, 3), 4, MASK, True, (False, False), "gated", 6, "markov", own_head=True
    ),
    "assistant": AssistantConfig(ASSISTANT, D),
    "eagle-small": EagleConfig(LAYER, draft_vocab_size=REDUCED).with_quantization("int8"),
    "dflash2": BlockConfig(BLOCK, V, D, (0, 2), 5, MASK, False, (False, False), **CONVOLVED),
    "domino": BlockConfig(BLOCK, V, D, (1, 3), 4, MASK, True, (False, False), domino=DominoConfig(10, 8, 1)),
    "lilicorr": BlockConfig(BLOCK, V, D, (1, 2), 5, MASK, False, (False, False), candidates=4, lilicorr=LILICORR),
    "xpress": BlockConfig(BLOCK, REDUCED, D, (1, 2), 5, MASK, False, (False, False), own_head=True, **REFINED),
}
SHORT = 27  # number of positions of a draft head that has fewer than its target
VARIANTS: dict[str, HeadConfig] = HEADS | {
    "eagle-short": EagleConfig(dataclasses.replace(LAYER, max_position=SHORT), own_embedding=True, norms=True),
    "mtp-two": MTPConfig(LAYERS),
    "mtp-plain-output": MTPConfig(dataclasses.replace(LAYER, max_position=SHORT), norm_output=False, mask_first=True),
    "mtp-latents": MTPConfig(dataclasses.replace(LATENTS, num_layers=1, windows=())),
    "eagle3-final-feature": Eagle3Config(LAYER, V, D, num_aux_layers=0, norm_output=True, own_head=False),
    "eagle3-norms": Eagle3Config(
        LAYERS, REDUCED, D, aux_layers=(1, 2, 3), norm_each_aux=True, norm_before_residual=True, own_embedding=True
    ),
    "eagle3-bare": Eagle3Config(LAYERS, REDUCED, D, aux_layers=(1, 2, 3), norm_before_head=False, fuse_bias=True),
    "p-eagle-short": Eagle3Config(
        dataclasses.replace(LAYER, max_position=SHORT),
        V,
        D,
        aux_layers=(1, 2, 3),
        norm_before_fuse=True,
        own_embedding=True,
        mask_token_id=V - 1,
    ),
    "pard-short": PardConfig(dataclasses.replace(DRAFT, max_position=SHORT), MASK),
    "mlp-tied": MLPConfig(V, D, 12, 3, tied=True, scale_input=True),
    "jetspec": BlockConfig(BLOCK, V, D, (1, 2), 9, MASK, False, (True, True)),
    "dflash-by-slot": BlockConfig(
        dataclasses.replace(BLOCK, windows=(6, None)), V, D, (1, 2), 5, MASK, False, (False, True), windows_by_slot=True
    ),
    "dflash-wide": BlockConfig(BLOCK, V, D, (1, 2), 10, MASK, False, (False, False)),
    "dflash-short": BlockConfig(
        dataclasses.replace(BLOCK, max_position=SHORT), V, D, (1, 3), 8, MASK, True, (False, False), own_embedding=True
    ),
    "dflash-anchored": BlockConfig(BLOCK, V, D, (0, 2, 3), 5, MASK, False, (False, True), windows_from_anchor=True),
    "xpress-causal": BlockConfig(
        BLOCK, V, D, (2,), 8, MASK, True, (False, True), windows_from_anchor=True, **REFINED | {"refine_passes": 9}
    ),
    "dspark-rnn": BlockConfig(BLOCK, V, D, (2,), 8, MASK, True, (False, False), "rnn", 4, "hidden"),
    "dspark-vanilla": BlockConfig(BLOCK, V, D, (1, 2), 5, MASK, False, (False, False), "vanilla", 4),
    "assistant-all-tokens": AssistantConfig(dataclasses.replace(ASSISTANT, windows=(None, 12)), D),
    "assistant-clusters": AssistantConfig(ASSISTANT, D, V, 9),
    "assistant-int8": AssistantConfig(ASSISTANT, D).with_quantization("int8"),
    "dflash2-causal": BlockConfig(
        BLOCK, V, D, (2,), 8, MASK, True, (True, True), own_head=True, **CONVOLVED | {"conv_taps": 3, "candidates": V}
    ),
    "domino-causal": BlockConfig(BLOCK, V, D, (2,), 6, MASK, True, (True, True), domino=DominoConfig(6, 9, 0)),
    "lilicorr-causal": BlockConfig(
        *(BLOCK, V, D, (2, 3), 8, MASK, False, (True, True)),
        **{"conv_taps": 2, "conv_group": 4, "candidates": 3},
        lilicorr=dataclasses.replace(LILICORR, hidden_size=D, num_layers=1, num_heads=2),
    ),
    "lilicorr-short": BlockConfig(
        *(dataclasses.replace(BLOCK, max_position=SHORT), V, D, (1, 3), 8, MASK, False, (False, False)),
        candidates=3,
        lilicorr=LILICORR,
    ),
    "medusa-borrowed-head": MedusaConfig(V, D, 12, num_blocks=2, own_head=False),
    "eagle3-int8": HEADS["eagle3"].with_quantization("int8"),
    "p-eagle-fp8": HEADS["p-eagle"].with_quantization("fp8"),
    "eagle-int4": HEADS["eagle"].with_quantization("int4"),
    "p-eagle-int4": HEADS["p-eagle"].with_quantization("int4"),
    "dspark-int4": HEADS["dspark"].with_quantization("int4"),
    "mtp-int4": HEADS["mtp"].with_quantization("int4"),
    "mtp-int8": HEADS["mtp"].with_quantization("int8"),
    "mtp-small": MTPConfig(LAYERS, draft_vocab_size=REDUCED).with_quantization("int8"),
    "mtp-plain-output-small": MTPConfig(LAYER, norm_output=False, mask_first=True, draft_vocab_size=REDUCED),
    "dspark-int8": HEADS["dspark"].with_quantization("int8"),
    "dflash2-int8": HEADS["dflash2"].with_quantization("int8"),
    "domino-small": HEADS["domino"].with_draft_vocabulary(REDUCED),
    "domino-int8": HEADS["domino"].with_quantization("int8"),
    "lilicorr-int8": HEADS["lilicorr"].with_quantization("int8"),
    "dflash-small": HEADS["dflash"].with_draft_vocabulary(REDUCED).with_quantization("fp8"),
    "pard-small": HEADS["pard"].with_draft_vocabulary(REDUCED).with_quantization("fp8"),
    "mlp-small": MLPConfig(V, D, 24, 4, draft_vocab_size=REDUCED, quantization="int8"),
    "medusa-small": MedusaConfig(V, D, 4, draft_vocab_size=REDUCED),
    "medusa-rows": MedusaConfig(V, D, 4, own_head=False, draft_vocab_size=REDUCED, quantization="int8"),
}


compile_fast = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def random_head(config: HeadConfig, seed: int = 0):
    """A draft head in which every parameter is random, biases and norms too.

    A reduced draft vocabulary is a random choice of tokens.
    """
    names = config.param_shapes()
    drawn = {name: _drawn(config, name, shape, seed) for name, shape in names.items()}
    return quantized_head(config, drawn)


def quantized_head(config: HeadConfig, params: dict[str, np.ndarray]):
    """The draft head of ``config`` from weights of floats, which are quantised if the config says so."""
    params = dict(params)
    for name, stored in config.stored_params().items():
        params[name], params[stored.names["scale"]] = quantize(np.asarray(params[name]), stored.form.name)
    return build_head(config, params)


def plain_config(config: HeadConfig) -> HeadConfig:
    """The same without quantisation."""
    return config.with_quantization(None)  # pyright: ignore[reportArgumentType]


def dequantized_head(config: HeadConfig, head):
    """The head that a quantised one stands for, its weights multiplied by their scales in float32."""
    params = {name: np.asarray(array) for name, array in flat_params(head).items()}
    for name, stored in config.stored_params().items():
        arrays = {part: params.pop(param) for part, param in stored.names.items()}
        params[name] = Weight.of(arrays, stored.form, stored.shape[1]).dequantize()
    return build_head(plain_config(config), params)


def _drawn(config: HeadConfig, name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, *name.encode()])
    if name == "draft_ids":
        ids, Vd = np.full(shape, -1), config.dimensions["Vd"]
        ids[np.sort(rng.permutation(len(ids))[:Vd])] = np.arange(Vd)
        return ids
    if name == "cluster_tokens":
        return rng.permutation(math.prod(shape)).reshape(shape)
    noise = rng.standard_normal(shape).astype(np.float32)
    if name.endswith("kernel_projection.weight"):
        noise *= 0.3  # of convolutions, several of which follow each other
    if len(shape) > 1:
        return noise * (0.1 if "embedding" in name and "refiner" not in name else shape[1] ** -0.5)
    return 0.1 * noise if name.endswith("bias") else noise if name == "mask_hidden" else 1 + 0.1 * noise


def serving(config: HeadConfig, head):
    """A copy of ``head`` after ``prepare``, which drafts."""
    return build_head(config, flat_params(head)).prepare()


def before_serving(config: HeadConfig, head):
    """A copy of ``head`` for a causal pass: not prepared, but it quantises what a prepared one quantises."""
    copy, ready = build_head(config, flat_params(head)), serving(config, head)
    names = "quantize_inputs", "quantize_outputs", "allow_partial_sums"
    prepared = {path: part for path, part in nnx.iter_graph(ready) if any(hasattr(part, name) for name in names)}
    for path, part in nnx.iter_graph(copy):
        for name in names:
            if path in prepared and hasattr(part, name):
                setattr(part, name, getattr(prepared[path], name))
    return copy


@functools.cache
def trained_head(config: HeadConfig, steps: int = 300, depth: int = 3):
    """A draft head that was trained on the target's texts after ``ragged_prompts()``, for so few steps that it is often
    right but not always. One that is quantised is quantised afterwards."""
    if config.quantization is not None:
        return quantized_head(config, flat_params(trained_head(plain_config(config), steps, depth)))
    prompts = ragged_prompts()
    texts = [prompt + tokens for prompt, tokens in zip(prompts, plain_greedy(target(), prompts), strict=True)]
    texts = jnp.pad(jnp.array(texts, jnp.int32), ((0, 0), (0, depth)))
    leaves, merge = flatten(random_head(config))
    trainable = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    optimizer = optax.adam(1e-2)
    target_leaves, merge_target = flatten(target())
    kinds = [config]
    if getattr(config, "lilicorr", None) is not None:  # whose candidates have to become the right ones, too
        kinds.append(dataclasses.replace(config, lilicorr=None, candidates=0))  # pyright: ignore[reportCallIssue]

    def loss(weights, target_leaves, length):
        all_leaves = list(leaves)
        for i, weight in zip(trainable, weights, strict=True):
            all_leaves[i] = weight
        head, lender = merge(all_leaves), merge_target(target_leaves)
        right = jnp.take_along_axis(texts, length[:, None] + jnp.arange(depth)[None], axis=1)
        total = 0.0
        for kind in kinds:
            logits = causal_drafts(kind, head, lender, texts, length, depth).logits
            log_q = jnp.take_along_axis(jax.nn.log_softmax(logits), right[..., None], axis=-1)
            total -= jnp.mean(jnp.where(jnp.isfinite(log_q), log_q, 0.0))
        return total

    def step(state, key, target_leaves):
        weights, moments = state
        length = jax.random.randint(key, len(texts), 2, MAX_LEN - depth)
        updates, moments = optimizer.update(jax.grad(loss)(weights, target_leaves, length), moments)
        return (optax.apply_updates(weights, updates), moments), None

    @compile_fast
    def fit(weights, target_leaves):
        keys = jax.random.split(jax.random.key(0), steps)
        return jax.lax.scan(lambda s, k: step(s, k, target_leaves), (weights, optimizer.init(weights)), keys)[0][0]

    for i, weight in zip(trainable, fit([leaves[i] for i in trainable], target_leaves), strict=True):
        leaves[i] = weight
    return merge(leaves)


@shared
def head_engine(name: str, K: int, verify="rejection", config=CONFIG, **speculation) -> Engine:
    """An engine with the target and the trained draft head of this name."""
    settings, head = Speculation(K, verify, **speculation), HEADS[name]
    drafter = drafter_for(head, TARGET, settings)
    return Engine(target(), serving(head, trained_head(head)), Decoding(drafter, verify), config)
