"""Distributions given by rows of logits, and the groups of tokens that a row is read in.

The distribution of a row is p(v) = exp(scale * logit[v] - lse) where logit[v] >= threshold, else 0.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.triton import block_ids, block_size, load_block

GROUP = 1024  # tokens that share a word of noise; another number draws other tokens from the same key


class WarpedLogits(NamedTuple):
    """Distributions of J rows for each of B requests: logits ``[B, J, V]`` as stored; scale, threshold, lse float32
    ``[B, J]``."""

    logits: jax.Array
    scale: jax.Array
    threshold: jax.Array
    lse: jax.Array

    def log_prob(self, width: int) -> jax.Array:
        """float32 ``[B, J, width]``; -inf for tokens that are cut or past the end of a narrower vocabulary."""
        z = self.logits.astype(jnp.float32)
        scaled = z * self.scale[..., None] - self.lse[..., None]
        log_prob = jnp.where(z >= self.threshold[..., None], scaled, -jnp.inf)
        return jnp.pad(log_prob, ((0, 0), (0, 0), (0, width - z.shape[2])), constant_values=-jnp.inf)

    def load(self, at, block, ids, when: Any = True):
        """In a kernel, of refs: the logits of row ``at`` on a block of tokens, float32; -inf if not ``when``."""
        return load_block(self.logits, at, block, ids, self.logits.shape[2], when=when).astype(jnp.float32)

    def log_prob_block(self, at, block, ids, when: Any = True):
        """In a kernel, of refs: row ``at`` of ``log_prob`` on a block of tokens, and -inf if not ``when``."""
        z = self.load(at, block, ids, when)
        log_prob = jnp.where(z >= self.threshold[at], z * self.scale[at] - self.lse[at], -jnp.inf)
        return jnp.where(when, log_prob, -jnp.inf)

    def line(self, at, log_weight: Any = 0.0, when: Any = True):
        """In a kernel, of refs: a and b where the log of the weighted distribution of row ``at`` is a * logit + b, no
        token cut.

        If not ``when``, those of a row whose logits were loaded as -inf.
        """
        return jnp.where(when, self.scale[at], 1.0), jnp.where(when, log_weight - self.lse[at], 0.0)


def group_size(V: int) -> int:
    """Tokens of a group."""
    return block_size(V, GROUP)


def num_groups(V: int) -> int:
    """Groups of a row, the last of them not always full."""
    return pl.cdiv(V, group_size(V))


def in_groups(x) -> jax.Array:
    """float32 ``[..., V] -> [..., groups, size]``; what is past the end is -inf."""
    V = x.shape[-1]
    groups, size = num_groups(V), group_size(V)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, groups * size - V)]
    return jnp.pad(x, padding, constant_values=-jnp.inf).reshape(*x.shape[:-1], groups, size)


def store_groups(ref, at, block, x):
    """In a kernel: ``ref[*at, groups of a block] = x``."""
    ids = block_ids(block, x.shape[0])
    pltriton.store(ref.at[(*at, pl.ds(block * x.shape[0], x.shape[0]))], x, mask=ids < ref.shape[-1])


def load_groups(ref, at, *, other):
    """In a kernel: ``ref[*at, :]``, padded to a power of two with ``other``, and the ids of the groups."""
    ids = block_ids(0, pl.next_power_of_2(ref.shape[-1]))
    return load_block(ref, at, 0, ids, ref.shape[-1], other=other), ids
