"""Of how many experts a pass reads the weights."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models import experts
from jspec.models.cache import PagedView, init_pool


def experts_hit(target, batch: int, width: int) -> float | None:
    """How many distinct experts a layer sends tokens to, on average over layers, or None for a target without experts.

    The target reads ``width`` random tokens in each of ``batch`` rows. Its layers run one after another, so that one layer
    is compiled and not the whole model."""
    if target.config.experts is None:
        return None
    found: list[int] = []
    route = experts.route

    def counting(*args):
        routed = route(*args)
        jax.debug.callback(lambda expert: found.append(len(np.unique(expert))), routed.expert)
        return routed

    tokens = jax.random.randint(jax.random.key(3), (batch, width), 0, target.config.vocab_size, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    table = 1 + jnp.arange(batch, dtype=jnp.int32)[:, None]
    cache = init_pool(target.cache_shape(), 1 + batch, max(16, width), target.dtype)
    jax.clear_caches()  # of layers that do not count
    with mock.patch.object(experts, "route", counting):
        view = PagedView(table, positions, jnp.ones(positions.shape, bool))
        jax.block_until_ready(target(tokens, positions, cache, view)[0])
        jax.effects_barrier()
    jax.clear_caches()  # of layers that do
    return float(np.mean(found))
