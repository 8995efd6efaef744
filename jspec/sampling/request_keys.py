"""The random keys of requests: from a seed, from a JAX key, or fresh."""

import secrets
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec._validation import require
from jspec.sampling.params import SamplingParams


def request_keys(params: Sequence[SamplingParams], key: jax.Array | None) -> list[np.ndarray]:
    """A Threefry key for each prompt, uint32 ``[2]``.

    Args:
      params: one for each prompt. A ``seed`` makes the key of its prompt; without one a fresh key is drawn.
      key: None, a JAX key for all prompts, of which prompt i gets ``fold_in(key, i)``, or an array of one key each.

    Raises:
      ValueError: ``key`` is no such key, or given beside a seed.
    """
    if key is None:
        seeds = [secrets.randbits(63) if p.seed is None else p.seed for p in params]
        return [np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32) for seed in seeds]
    if any(p.seed is not None for p in params):
        raise ValueError("key and SamplingParams.seed are both given: expected one of them")
    ok = hasattr(key, "dtype") and hasattr(key, "shape")
    require(ok, "key", key, "a JAX key; a number goes into SamplingParams.seed")
    keys = key
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        ok = key.dtype == np.uint32 and key.shape[-1:] == (2,)
        require(ok, "key", key, "a JAX key, of jax.random.key, or its data, uint32 [2]")
        keys = jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32")
    implementation = str(jax.random.key_impl(keys))
    if implementation != "threefry2x32":
        raise ValueError(f"key has implementation {implementation}: expected jax.random's default, threefry2x32")
    if keys.ndim == 0:
        keys = jax.vmap(jax.random.fold_in, (None, 0))(keys, np.arange(len(params), dtype=np.uint32))
    if keys.shape != (len(params),):
        raise ValueError(f"key has shape {keys.shape}: expected one key, or one per prompt, ({len(params)},)")
    return list(np.asarray(jax.random.key_data(keys)))


def copied_keys(params: SamplingParams, key_data: np.ndarray) -> list[np.ndarray]:
    """A key for each of the n completions that ``params`` ask for.

    Completion i has the seed ``seed + i``, and without a seed ``fold_in(key, i)``. A single one has the key itself.
    """
    if params.n == 1:
        return [key_data]
    if params.seed is not None:
        return request_keys(params.copies(), None)
    key = jax.random.wrap_key_data(jnp.asarray(key_data), impl="threefry2x32")
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, np.arange(params.n, dtype=np.uint32))
    return list(np.asarray(jax.random.key_data(keys)))
