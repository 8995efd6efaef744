"""``load_modules``: the modules of a target and its draft, from the weights in their checkpoints."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.tensors.params import StoredParams
from jspec.config import ModelConfig, Shards
from jspec.config.heads import HeadConfig
from jspec.drafting.base import Drafter
from jspec.drafting.methods import drafter_for
from jspec.engine.multihost.leader import fewest
from jspec.loading.kv_cache_dtype import kv_rounding
from jspec.loading.plan import Plan
from jspec.models import Decoder, build_head
from jspec.models.sharding import build_model, mesh_of, on_every_device
from jspec.models.w8a8 import with_quantized_activations
from jspec.registry import DraftMethod, resolve


def load_modules(plan: Plan) -> tuple[Decoder, Any, Callable[..., Drafter]]:
    """The modules that a plan asks for. This reads the weights.

    Returns:
      the target's module; the draft's module, or the arrays that a method without a checkpoint reads, or None; and what
      builds the drafter around both, as ``drafter_for`` does.
    """
    pair, config, draft, check_files = plan.pair, plan.engine, plan.draft, plan.asked.check_files
    shards, draft_shards = plan.shards
    module = _prepared(plan)
    rounding = kv_rounding(config, pair.target)
    _, params = pair.target.language_model(config.dtype, check_files)
    target = build_model(plan.target, params, config.dtype, shards)
    if isinstance(pair.draft, Checkpoint) and plan.draft_config is not None:
        params = pair.draft.params(config.dtype, check_files)
        draft, module = build_draft_module(plan.draft_config, params, config.dtype, target, draft_shards)
    if check_files:
        pair.require_intact()
    if shards is not None and draft_shards is None and module is not None:
        module = on_every_device(module, mesh_of(shards.count, shards.axis))
    target.kv_rounding = rounding
    if config.activation_dtype != "auto":
        target = with_quantized_activations(target, config.activation_dtype)
    return target, module, drafter_for(draft, plan.target, plan.speculation)


def build_draft_module(
    config: ModelConfig | HeadConfig,
    params: Mapping[str, np.ndarray],
    dtype: str,
    target: Decoder,
    shards: Shards | None = None,
):
    """Config and module of a draft, ready to serve.

    Where a draft head holds a copy of the target's embedding or output head, its module borrows the target's own array,
    and the config that is returned says so.

    Args:
      config: the config in the checkpoint, with the positions that are used.
      params, dtype: as for ``build_model``.
      target: the target's module.
      shards: those of a draft model; None if it is whole, as a draft head always is.
    """
    if config.language_model is None:
        if not isinstance(params, StoredParams):
            arrays = params
            params = StoredParams("", {n: np.shape(arrays[n]) for n in arrays}, lambda n, i: np.asarray(arrays[n])[i])
        config, copies = _borrow(config, params, target)
        return config, build_head(config, params.without(copies), dtype).prepare()
    return config, build_model(config.language_model, params, dtype, shards).prepare()


def _borrow(config: HeadConfig, params: StoredParams, target: Decoder) -> tuple[HeadConfig, list[str]]:
    """``config`` without the weights that are copies of those of the target, and the names of their params.

    A weight of another type is not equal, so a draft head that is not quantised keeps its own beside a target that is. A
    target that divides or caps its logits would do so with the draft head's as well, so it lends no output head.
    """
    plain = target.config.logit_softcap is None and target.config.logit_divisor == 1
    lent = {
        "own_embedding": () if target.embedding_scale is not None else (target.embedding[...],),
        "own_head": jax.tree.leaves(target.output_weight) if plain else (),
    }
    copies = []
    for field, name in config.borrowable:
        if not getattr(config, field):
            continue
        stored = config.stored_params().get(name)
        names, theirs = [name] if stored is None else list(stored.names.values()), lent[field]
        rows = target.config.vocab_size  # of shards, the last has padding behind them
        alike = len(names) == len(theirs) and all(_same(params, n, a, rows) for n, a in zip(names, theirs, strict=True))
        if theirs and not theirs[0].is_fully_addressable:  # other processes compare their shards
            alike = bool(fewest(int(alike)))
        if alike:
            copies += names
            config = dataclasses.replace(config, **{field: False})  # pyright: ignore[reportArgumentType]
    return config, copies


def _prepared(plan: Plan) -> Any:
    """The arrays that the drafter of a method without a checkpoint reads, the tokens of a corpus say; None if none."""
    method = plan.pair.draft
    if not isinstance(method, DraftMethod) or method.prepare is None or method.argument is None:
        return None
    return resolve(method.prepare)(plan.asked.method_arguments[method.argument], plan.tokenizer, plan.target)


def _same(params: StoredParams, name: str, theirs: jax.Array, rows: int) -> bool:
    """Whether a param is equal to the first ``rows`` rows of another, as far as this process has their shards."""
    if params.shapes[name] != (rows, *theirs.shape[1:]):
        return False
    for shard in theirs.addressable_shards:
        first, stop, _ = shard.index[0].indices(rows)  # the last shard may have fewer rows, with padding behind them
        pieces = params.pieces(name, (slice(first, stop), *shard.index[1:]), theirs.dtype.itemsize)
        for piece, ours in zip(pieces, params.parts(name, pieces), strict=True):
            part = jax.lax.dynamic_slice_in_dim(shard.data, piece[0].start - first, len(ours))
            if ours.dtype != part.dtype or not np.array_equal(ours, np.asarray(part)):
                return False
    return True
