"""A target of two layers, or a draft head, as it is compiled in one order of sums: which passes give a token the same
residual streams and logits, and which stream differs first?

A prefill pass fills the cache with one text before every pass. The pass then reads a token of the text again, alone or
behind others of it, beside rows of other texts."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.kernels.invariance.run import Job, Run, bits, classes, compile_all, named, shape_of
from benchmarks.random_modules import random_module
from benchmarks.shapes import (
    GEMMA4_26B_A4B,
    GEMMA4_31B,
    GPT_OSS_20B,
    LLAMA_8B,
    QWEN3_06B,
    QWEN3_30B_A3B,
    SEED_OSS_36B,
    TINY,
    TINY_MIXTURE,
    head_for,
)
from jspec.config import Experts, ModelConfig
from jspec.config.engine import CHUNK
from jspec.config.heads import HeadConfig
from jspec.engine.runner.compile import decode_options
from jspec.models.cache_pools import KVRounding, init_cache
from jspec.models.flatten import flatten
from jspec.models.kv_cache import PagedView
from jspec.models.params import DTYPES
from jspec.pallas.dispatch import one_order

LAYERS, PAGE = 2, 64


class Sizes(NamedTuple):
    """A text of S tokens in each of up to ``rows`` rows; the token at ``last`` is read in ``passes`` of rows and query
    tokens, and in ``prefill`` passes. Logits are those of ``vocabulary`` tokens at most."""

    S: int = 2048
    last: int = 1000
    rows: int = 64
    passes: tuple[tuple[int, int], ...] = ((1, 1), (1, 5), (16, 1), (16, 5), (64, 5))
    prefill: tuple[int, ...] = (64, 512)
    chunk: int = CHUNK
    vocabulary: int = 32_768


SMALL = Sizes(128, 70, 2, ((1, 1), (2, 2)), (), 64)


class Kind(NamedTuple):
    """A kind of target: its shape, how its weights are stored, and whether it rounds what it caches. With ``head``, a draft
    head for it of this method, whose configuration has these other ``fields``."""

    shape: ModelConfig = LLAMA_8B
    small: ModelConfig = TINY
    quantization: str | None = None
    rounds_cache: bool = False
    head: str | None = None
    fields: Mapping[str, Any] = {}


KINDS = {
    "bf16": Kind(),
    "int4": Kind(quantization="int4"),
    "FP8 blocks": Kind(quantization="fp8_block"),
    "norms of heads": Kind(QWEN3_06B, dataclasses.replace(TINY, qk_norm=True)),
    "experts": Kind(QWEN3_30B_A3B, TINY_MIXTURE),
    "experts in int4": Kind(QWEN3_30B_A3B, TINY_MIXTURE, quantization="int4"),
    "gpt-oss": Kind(GPT_OSS_20B, TINY_MIXTURE),
    "biases": Kind(SEED_OSS_36B, dataclasses.replace(TINY, qkv_bias=True)),
    "Gemma 4": Kind(GEMMA4_31B),
    "Gemma 4, experts": Kind(GEMMA4_26B_A4B, TINY_MIXTURE),
    "NVFP4": Kind(quantization="nvfp4"),
    "int8": Kind(quantization="int8"),
    "cache in FP8": Kind(rounds_cache=True),
    "Gemma 2 and 3": Kind(
        dataclasses.replace(
            LLAMA_8B,
            **{"norm": "rms_offset", "norm_placement": "around", "activation": "gelu_tanh", "qk_norm": True},
            **{"attention_softcap": 50.0, "logit_softcap": 30.0, "embedding_multiplier": 64.0},
        )
    ),
    "OLMo 2, Granite": Kind(
        dataclasses.replace(
            LLAMA_8B,
            **{"norm_placement": "after", "qk_norm": True, "qk_norm_over": "projection"},
            **{"residual_multiplier": 0.22, "logit_divisor": 16.0, "embedding_multiplier": 12.0},
        )
    ),
    "layer norms": Kind(
        dataclasses.replace(
            LLAMA_8B,
            **{"norm": "layer", "activation": "gelu", "gated_mlp": False, "rope": None, "position_offset": 2},
            **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True),
        )
    ),
    "shared experts": Kind(
        dataclasses.replace(
            QWEN3_30B_A3B,
            experts=Experts(
                *(128, 8, 768), scores="sigmoid", corrected=True, groups=8, chosen_groups=4, scale=2.5, shared=1
            ),
        ),
        TINY_MIXTURE,
    ),
    "a gated shared expert": Kind(
        dataclasses.replace(
            QWEN3_30B_A3B,
            qk_norm_after_rope=True,
            experts=Experts(128, 8, 768, renormalise=False, shared_width=768, shared_gate=True),
        ),
        TINY_MIXTURE,
    ),
    "EAGLE": Kind(head="eagle"),
    "EAGLE-3": Kind(head="eagle3"),
    "MTP": Kind(head="mtp"),
    "EAGLE-3, more norms": Kind(
        head="eagle3",
        fields=dict.fromkeys(("norm_each_aux", "norm_before_residual", "norm_output", "fuse_bias"), True),
    ),
}


class Drafting(nnx.Module):
    """A draft head and its target, with the methods of a target that ``program`` calls. Slot i reads token i and a feature
    that belongs to the token. Streams are what ``fuse``, the layers and ``recycle`` return."""

    def __init__(self, target, config: HeadConfig, dtype: str):
        self.target, self.head = target, random_module(config, dtype=dtype)
        size = getattr(config, "feature_size", target.config.hidden_size)
        shape = target.config.vocab_size, size
        self.features = nnx.Param(jax.random.normal(jax.random.key(1), shape, DTYPES[dtype]))

    def with_auxiliary(self, tokens, positions, cache, view, aux_layers):
        """Streams in place of auxiliary hidden states."""
        del aux_layers
        fused = self.head.fuse(self.features[...][tokens])
        hidden, cache = self.head(self.head.embed(tokens, self.target), fused, positions, cache, view)
        return hidden, jnp.concatenate([fused, hidden, self.head.recycle(hidden)], axis=-1), cache

    def logits(self, hidden):
        return self.head.logits(hidden, self.target)

    def cache_shape(self):
        return self.head.cache_shape()


def last_layers(shape: ModelConfig, vocabulary: int, quantization: str | None) -> ModelConfig:
    """The last ``LAYERS`` layers of a shape. Of a mixture the first of them has a plain MLP, if layers may differ."""
    of_layers = {
        field.name: value[-LAYERS:]
        for field in dataclasses.fields(shape)
        if isinstance(value := getattr(shape, field.name), tuple) and len(value) == shape.num_layers
    }
    experts = shape.experts
    if experts is not None:
        experts = dataclasses.replace(experts, layers=() if experts.beside_mlp else (False, True))
    if shape.delta_nets is not None:
        of_layers["delta_nets"] = dataclasses.replace(shape.delta_nets, layers=shape.delta_nets.layers[-LAYERS:])
    vocabulary = min(shape.vocab_size, vocabulary)
    stored = {} if quantization is None else {"quantization": quantization}
    sizes = {"num_layers": LAYERS, "mtp_layers": 0, "vocab_size": vocabulary, "experts": experts}
    return dataclasses.replace(shape, **of_layers, **stored, **sizes)


def program(merge, shared: bool, logits: bool):
    """``(leaves, cache, tokens, positions, table, row, index) -> (streams and logits of one token, cache)``."""

    @one_order()
    def step(leaves, cache, tokens, positions, table, row, index):
        model = merge(leaves)
        view = PagedView(table, positions, jnp.ones(positions.shape, bool), shared=shared)
        hidden, streams, cache = model.with_auxiliary(tokens, positions, cache, view, tuple(range(LAYERS + 1)))
        seen = (streams[row, index], hidden[row, index])
        return (*seen, model.logits(hidden)[row, index]) if logits else seen, cache

    return step


@dataclasses.dataclass
class Target:
    """A target, or a draft head, whose cache has the text of row 0 in its first pages."""

    config: ModelConfig
    sizes: Sizes
    leaves: Any
    merge: Any
    cache: Any
    text: np.ndarray

    @classmethod
    def make(cls, config: ModelConfig, kind: Kind, sizes: Sizes, dtype: str) -> "Target":
        model = random_module(config, dtype=dtype)
        if kind.head is not None:
            model = Drafting(model, dataclasses.replace(head_for(config, kind.head), **kind.fields), dtype)
        if kind.rounds_cache:
            model.kv_rounding = (KVRounding(),) * config.num_layers
        leaves, merge = flatten(model)
        pages = 1 + sizes.rows * (sizes.S // PAGE)
        cache = init_cache(model.cache_shape(), pages, PAGE, sizes.rows, 16, DTYPES[dtype])
        text = np.random.default_rng(0).integers(0, config.vocab_size, sizes.S).astype(np.int32)
        return cls(config, sizes, leaves, merge, cache, text)

    def job(self, B: int, T: int, shared: bool) -> Job:
        tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
        table, number = jax.ShapeDtypeStruct((B, self.sizes.S // PAGE), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
        args = shape_of(self.leaves), shape_of(self.cache), tokens, tokens, table, number, number
        options = decode_options(jax.tree.leaves(self.leaves), B * T)
        return Job(program(self.merge, shared, not shared), args, options, donate=1)

    def prefill(self, compiled, first: int, count: int, index: int = 0):
        """What token ``index`` of a pass over ``count`` tokens of the text gets."""
        T, M = self.sizes.chunk, self.sizes.S // PAGE
        positions = first + np.arange(count, dtype=np.int32).reshape(-1, T)
        table = np.broadcast_to(1 + np.arange(M, dtype=np.int32), (len(positions), M))
        return self._call(compiled, self.text[positions], positions, table, index // T, index % T)

    def verify(self, compiled, B: int, T: int, index: int, own: int, seed: int):
        """What the token gets as query token ``index`` of row ``own``."""
        rng, M = np.random.default_rng(seed), self.sizes.S // PAGE
        first = rng.integers(0, self.sizes.S - T, B)
        first[own] = self.sizes.last - index
        positions = (first[:, None] + np.arange(T)).astype(np.int32)
        tokens = rng.integers(0, self.config.vocab_size, (B, T)).astype(np.int32)
        tokens[own] = self.text[positions[own]]
        tables = 1 + np.arange(self.sizes.rows * M, dtype=np.int32).reshape(-1, M)
        order = [*range(1, own + 1), 0, *range(own + 1, B)]
        return self._call(compiled, tokens, positions, tables[order], own, index)

    def _call(self, compiled, tokens, positions, table, row: int, index: int):
        out, self.cache = compiled(
            self.leaves, self.cache, *map(jnp.asarray, (tokens, positions, table)), jnp.int32(row), jnp.int32(index)
        )
        streams, *rest = (np.asarray(x) for x in out)
        return (*np.split(streams, LAYERS + 1), *rest)


def steps(run: Run, tokens):
    """A line for each kind."""
    del tokens
    sizes = SMALL if run.small else Sizes()
    for name, kind in KINDS.items():
        if run.small and name not in ("bf16", "experts in int4", "EAGLE-3, more norms"):
            continue
        run.attempt(f"step, {name}", step, run, name, kind, sizes)


def step(run: Run, kind: str, of: Kind, sizes: Sizes):
    """Print classes after each layer, and pairs of passes."""
    shape = of.small if run.small else of.shape
    config = last_layers(shape, sizes.vocabulary, of.quantization)
    target = Target.make(config, of, sizes, "float32" if run.small else "bfloat16")
    whole = f"prefill {sizes.S}"
    passes = {whole: (sizes.S // sizes.chunk, sizes.chunk, True)}
    passes |= {f"{B}x{T}": (B, T, False) for B, T in sizes.passes}
    passes |= {f"prefill {count}": (count // sizes.chunk, sizes.chunk, True) for count in sizes.prefill}
    programs = compile_all({name: target.job(*size) for name, size in passes.items()})
    if isinstance(programs[whole], Exception):
        raise programs[whole]
    found: dict[str, list[tuple]] = {}
    for name, (B, T, shared) in passes.items():
        run.attempt(
            f"step, {kind}, {name}",
            functools.partial(_compare, run, target, programs, whole, found),
            name,
            B,
            T,
            shared,
        )
    firsts = {name: results[0] for name, results in found.items()}
    moved = [name for name, results in found.items() if len({bits(one) for one in results}) > 1]
    for layer in range(LAYERS + 1):
        run.say(f"step, {kind}, stream {layer}", named(classes({name: one[layer] for name, one in firsts.items()})))
    run.say_classes(f"step, {kind}, normed", {name: one[LAYERS + 1] for name, one in firsts.items()})
    logits = {name: one[-1] for name, one in firsts.items() if len(one) == LAYERS + 3}
    note = f"; place or neighbours matter: {', '.join(moved)}" if moved else ""
    run.say_classes(
        f"step, {kind}, logits", logits, note, moved=moved, argmax={n: int(np.argmax(x)) for n, x in logits.items()}
    )


def _compare(run: Run, target: Target, programs, whole: str, found, name: str, B: int, T: int, shared: bool):
    if isinstance(programs[name], Exception):
        raise programs[name]
    sizes, results = target.sizes, []

    def fill(index: int):
        return target.prefill(programs[whole], 0, sizes.S, index)

    with run.watched():
        if name == whole:
            results = [fill(sizes.last)]
        elif shared:
            for index in (B * T - 1, B * T // 2):
                fill(0)
                results.append(target.prefill(programs[name], sizes.last - index, B * T, index))
        else:
            places = [(index, 0, 0) for index in dict.fromkeys((0, T - 1))] + ([(0, B - 1, 1)] if B > 1 else [])
            for place in places:
                fill(0)
                results.append(target.verify(programs[name], B, T, *place))
    found[name] = results
