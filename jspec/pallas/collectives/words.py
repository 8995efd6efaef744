"""Numbers as 32-bit words, which packets carry, and words as numbers."""

import jax
import jax.numpy as jnp


def as_words(x) -> jax.Array | None:
    """bfloat16 or float32 ``[.., D]`` as 32-bit words ``[.., D / 2]`` or ``[.., D]``, without a copy."""
    if x is None:
        return None
    if x.dtype.itemsize == 2:
        x = x.reshape(*x.shape[:-1], -1, 2)
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def as_numbers(words, dtype) -> jax.Array:
    numbers = jax.lax.bitcast_convert_type(words, dtype)
    return numbers.reshape(len(words), -1)


def split(words, dtype) -> list[jax.Array]:
    """In a kernel: the numbers of words, float32; of bfloat16 the lower halves, and the upper ones."""
    if dtype == jnp.float32:
        return [jax.lax.bitcast_convert_type(words, jnp.float32)]
    halves = jnp.left_shift(words, 16), words & jnp.int32(-65536)
    return [jax.lax.bitcast_convert_type(half, jnp.float32) for half in halves]


def joined(numbers) -> jax.Array:
    """In a kernel: the words of numbers that ``split`` has, in their dtype."""
    if len(numbers) == 1:
        return jax.lax.bitcast_convert_type(numbers[0], jnp.int32)
    low, high = (jax.lax.bitcast_convert_type(half.astype(jnp.float32), jnp.int32) for half in numbers)
    return jnp.right_shift(low, 16) & jnp.int32(65535) | high & jnp.int32(-65536)
