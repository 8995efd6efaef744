"""Random arrays, drawn without a program for each of their shapes."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(rng: np.random.Generator, shape, dtype="float32", scale: float = 1.0, mean: float = 0.0) -> jax.Array:
    """Normal numbers of a mean and a standard deviation."""
    return jax.device_put((mean + scale * rng.standard_normal(shape)).astype(jnp.dtype(dtype)))


def normal_numbers(shape, seed=0, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)
