"""Residuals of a target and its drafts, at every place of a batch that is special."""

import functools

import jax
import jax.numpy as jnp

from jspec.pallas.sampling.residual import Residual
from jspec.pallas.sampling.sample import log_weights
from jspec.pallas.sampling.warped_logits import WarpedLogits
from jspec.sampling.streams import RoundNoise

B, K, T = 4, 3, 4


def distributions(key, J, V, dtype, spread=3.0):
    """J rows per request, every second one cut below its median."""
    keys = jax.random.split(key, 2)
    logits = (spread * jax.random.normal(keys[0], (B, J, V))).astype(dtype)
    scale = jax.random.uniform(keys[1], (B, J), minval=0.5, maxval=2.0)
    median = jnp.sort(logits.astype(jnp.float32), axis=-1)[..., V // 2]
    cutoff = jnp.where((jnp.arange(B)[:, None] + jnp.arange(J)[None, :]) % 2 == 0, -jnp.inf, median)
    *_, lse = log_weights(logits.reshape(-1, V), scale.reshape(-1), cutoff.reshape(-1))
    return WarpedLogits(logits, scale, cutoff, lse.reshape(B, J))


def some_tokens(key, V, V_q):
    """A draft vocabulary of any tokens in any order, ``draft_ids`` int32 [V]."""
    tokens = jax.random.permutation(key, V)[:V_q]
    return jnp.full(V, -1, jnp.int32).at[tokens].set(jnp.arange(V_q, dtype=jnp.int32))


def problem(V, V_q, dtype, seed=0, weighed=True, scattered=False):
    """A residual and the rest of ``residual_sample``: accepted drafts at both ends, of point masses and of few valid
    ones. The draft has logits for the first ``V_q`` tokens, or for so many of any if ``scattered``."""
    return _problem(jax.random.key(seed), V, V_q, dtype, weighed, scattered)


@functools.partial(jax.jit, static_argnames=("V", "V_q", "dtype", "weighed", "scattered"))
def _problem(key, V, V_q, dtype, weighed, scattered):
    keys = jax.random.split(key, 4)
    p, q = distributions(keys[0], T, V, dtype), distributions(keys[1], K, V_q, dtype)
    drafts = jax.random.randint(keys[2], (B, K), 0, V)
    row, draft = jnp.arange(B)[:, None], jnp.arange(K)[None]
    point_mass = (row == 3) | ((row == 1) & (draft == K - 1)) | ((row == 0) & (draft == 1))
    valid = jnp.array([K, K, K, K - 1], jnp.int32)
    log_weight = jnp.log(jax.random.uniform(keys[2], (B, T), minval=0.2)).at[0].set(0.0) if weighed else None
    noise = RoundNoise(jax.random.key_data(jax.random.split(keys[3], B)), jnp.arange(B, dtype=jnp.int32) + 9)
    at, best = jnp.array([0, K - 1, K, 1], jnp.int32), jnp.full((B, T), -1).at[0].set(V - 1)
    draft_ids = some_tokens(keys[2], V, V_q) if scattered else None
    return Residual(p, q, drafts, point_mass, valid, log_weight, draft_ids), at, noise, best
