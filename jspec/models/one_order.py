"""Which kernel of a model has not one order of sums for any number of tokens, so that a text could depend on who shares its
passes. Each row of a table of kernels says so of itself (``jspec.pallas.dispatch.Row``)."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from jspec.config import DeltaNets, Experts, LayerConfig, ModelConfig
from jspec.config.engine import EngineConfig, UnpinnedConfig
from jspec.config.heads import Eagle3Config, EagleConfig, MTPConfig
from jspec.models.cache_pools import CacheShape
from jspec.models.delta_net import GatedDeltaNet
from jspec.models.mla import LatentAttention
from jspec.models.moe import Mixture
from jspec.models.products import kernels_by_size
from jspec.pallas.attention import table as attention
from jspec.pallas.delta_net.recur import RECURRENCE
from jspec.pallas.dispatch import KernelRow, Row, one_order, row_of, traced_for_backend
from jspec.pallas.mla.attention import IN_PAGES
from jspec.pallas.moe.grouped_mlp import EXPERTS

__all__ = ["one_order", "traced_for_backend", "unpinned", "without_one_order"]


def _unordered(name: str) -> KernelRow:
    """A row for what has no order of sums on any platform, and is in no table of kernels."""
    return KernelRow(name, lambda: None, lambda *_: iter(()), cpu_order=None)


_SUMS_OVER_SHARDS = _unordered("sums over shards")
_UNKNOWN = _unordered("code that jspec does not know")
# With jax 0.12, engines in bfloat16 on a CPU were compared with the shipped models alone.
_ROUNDS_IN_BFLOAT16 = _unordered("rounds in bfloat16 on a CPU with jax 0.12")
_SIZES = 1, 2, 8, 16, 64, 80, 320, 512, 4096  # tokens of a pass
# On a GPU, XLA may round what lies between kernels in other ways in each program. So a model has one order there only if
# whole passes of its kind were compared on a card (``benchmarks.kernels.invariance``, ``steps`` and ``states``). For each
# class of a configuration that was: the fields that were compared with other values than their defaults, and where that was
# one value among several that change what lies between kernels, this value.
_COMPARED = {
    ModelConfig: {
        *("architecture", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"),
        *("head_dim", "max_position", "rms_norm_eps", "rope", "layer_ropes", "windows", "layers", "experts"),
        *("tie_embeddings", "bos_token_id", "eos_token_ids", "quantization", "other_formats", "mtp_layers"),
        *("draft_vocab_size", "qkv_bias", "output_bias", "mlp_bias", "attention_scale", "attention_sinks"),
        *("attention_softcap", "logit_softcap", "logit_divisor", "embedding_multiplier", "residual_multiplier"),
        *("norm='rms_wide'", "norm='rms_offset'", "norm='layer'", "norm_placement='around'", "norm_placement='after'"),
        *("qk_norm", "qk_norm_over", "qk_norm_after_rope", "value_norm", "activation='gelu_tanh'", "activation='gelu'"),
        *("gated_mlp", "layer_scalars", "position_offset", "attention_gate", "delta_nets"),
    },
    DeltaNets: {"key_heads", "value_heads", "key_size=128", "value_size=128", "taps=4", "layers"},
    Experts: {
        *("count", "chosen", "width", "renormalise", "layers", "biases", "clamp", "stored", "scores='sigmoid'"),
        *("groups", "chosen_groups", "scale", "corrected", "shared", "shared_width", "beside_mlp", "shared_gate"),
    },
    LayerConfig: {"head_dim", "num_kv_heads", "intermediate_size", "keys_are_values"},
    EagleConfig: {"layers", "own_embedding", "draft_vocab_size"},
    Eagle3Config: {
        *("layers", "draft_vocab_size", "target_hidden_size", "num_aux_layers", "aux_layers", "own_embedding"),
        *("own_head", "mask_token_id", "trained_drafts"),
    },
    MTPConfig: {"layers", "draft_vocab_size"},
}


def unpinned(config: EngineConfig, *models: Any) -> EngineConfig:
    """The configuration of an engine of some models, the target first: it pins no shapes where they have one order of
    sums."""
    if config.reproducible and without_one_order(config.dtype, *models) is None:
        return UnpinnedConfig.of(config, models[0].config)
    return config


def without_one_order(dtype: str, *models: Any) -> str | None:
    """What computes a token's numbers in another order among other numbers of tokens, the first of it in some models of a
    dtype, on the default device; None if nothing does. A model may be None."""
    for model in models:
        if model is not None:
            for name, rows in _kernels(model, dtype):
                orders = {row.order_on(jax.default_backend()) for row in rows}
                if None in orders or len(orders) > 1:
                    names = ", ".join(dict.fromkeys(f'"{row.name}"' for row in rows))
                    return f"{name} by {names}"
    return None


def _kernels(model: Any, dtype: str) -> Iterator[tuple[str, Sequence[Row]]]:
    """The kernels of each part of a model, for all numbers of tokens."""
    if not type(model).__module__.startswith("jspec.models."):
        yield type(model).__name__, [_UNKNOWN]
        return
    if jax.default_backend() == "cpu" and dtype != "float32" and jax.__version_info__ >= (0, 12):
        yield "rounds", [_ROUNDS_IN_BFLOAT16]
    if jax.default_backend() != "cpu" and (what := _not_compared(model.config)) is not None:
        yield "layers", [_unordered(f"{what}, of which no passes were compared on a GPU")]
    if getattr(model, "shards", None) is not None:
        yield "layers", [_SUMS_OVER_SHARDS]
    for path, part in nnx.iter_graph(model):
        name = ".".join(map(str, path))
        if isinstance(part, GatedDeltaNet):
            yield name, [RECURRENCE]
        elif isinstance(part, LatentAttention):
            yield name, [IN_PAGES]
        elif isinstance(part, Mixture):
            yield name, [EXPERTS]
    cached = model.cache_shape() if hasattr(model, "cache_shape") else ()
    shapes = [shape for shape in cached if isinstance(shape, CacheShape) and not shape.latents]
    for size in dict.fromkeys(shape.size for shape in shapes):
        query, pool = (jax.ShapeDtypeStruct((1, 1, slots, size), dtype) for slots in (1, 64))
        yield f"attention with heads of {size}", [row_of(attention.TABLE, attention.Attention(query, pool), True)]
    yield from kernels_by_size(model, dtype, _SIZES)


def _not_compared(config: Any) -> str | None:
    """What a configuration has of which no whole passes were compared on a GPU, in words; None if it has nothing of the
    kind."""
    if (compared := _COMPARED.get(type(config))) is None:
        return type(config).__name__
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        told = f"{field.name}={value!r}"
        if value != field.default and field.name not in compared and told not in compared:
            return told
        parts = [one for one in (value if isinstance(value, tuple) else (value,)) if type(one) in _COMPARED]
        found = next(filter(None, map(_not_compared, parts)), None)
        if found is not None:
            return f"{field.name}.{found}"
    return None
