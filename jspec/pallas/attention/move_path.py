"""Moves keys and values of an accepted path of drafts into the slots of a chain."""

import jax
import jax.numpy as jnp


def move_path(cache, table, source, target):
    """The cache with what slot ``source[b, j]`` holds at slot ``target[b, j]``."""

    def moved(pool):
        P = pool.shape[2]

        def at(slots):
            index = jnp.maximum(slots, 0)
            page = jnp.take_along_axis(table, index // P, axis=1)
            return jnp.where((slots >= 0) & (page != 0), page, pool.shape[1]), index % P

        page, slot = at(source)
        values = pool.at[:, page, slot].get(mode="clip")
        page, slot = at(target)
        return pool.at[:, page, slot].set(values, mode="drop")

    def of_layer(kv):
        if kv is None:
            return None
        scales = kv.scales if kv.scales is None or not kv.scales.of_tokens else jax.tree.map(moved, kv.scales)
        return kv._replace(k=moved(kv.k), v=None if kv.v is None else moved(kv.v), scales=scales)

    return tuple(map(of_layer, cache))
