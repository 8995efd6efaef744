"""Of how many experts a pass reads the weights."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import ModelConfig
from jspec.models import moe
from jspec.models.kv_cache import PagedView
from jspec.pallas.delta_net.state import VerifyRows


def experts_hit(target, tokens, positions, cache, table) -> float | None:
    """How many distinct experts a layer sends tokens to, on average over layers, or None for a target without experts.

    The target reads ``tokens [B, T]`` at ``positions [B, T]`` with the pages ``table [B, M]`` of ``cache``. Its layers run
    one after another, so that one layer is compiled and not the whole model."""
    if target.config.experts is None:
        return None
    found: list[int] = []
    route = moe.route

    def counting(*args):
        routed = route(*args)
        jax.debug.callback(lambda expert: found.append(len(np.unique(expert))), routed.expert)
        return routed

    jax.clear_caches()  # of layers that do not count
    with mock.patch.object(moe, "route", counting):
        view = PagedView(table, positions, jnp.ones(positions.shape, bool), recurrent=all_rows(*positions.shape))
        jax.block_until_ready(target(tokens, positions, cache, view)[0])
        jax.effects_barrier()
    jax.clear_caches()  # of layers that do
    return float(np.mean(found))


def all_rows(B: int, T: int) -> VerifyRows:
    """A verify pass of T tokens in each of B rows, after one of whose tokens all were committed."""
    row, tokens = jnp.arange(B, dtype=jnp.int32), jnp.full(B, T, jnp.int32)
    return VerifyRows(row, tokens, tokens, jnp.zeros_like(row), jnp.zeros(B, bool))


def experts_hit_evenly(config: ModelConfig, tokens: int) -> float | None:
    """The same of tokens that choose evenly among the experts, as an expected number."""
    experts = config.experts
    if experts is None:
        return None
    return experts.count * (1 - (1 - experts.chosen / experts.count) ** tokens)
