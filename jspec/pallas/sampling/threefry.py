"""Noise from counters: the bits are those of ``jax.random.bits`` of a Threefry key.

Kernels and reference implementations share these functions, so that both compute the same numbers from a key.

Gumbel noise is -log(E) of an exponential E = -log1p(-u) with a 32-bit u, so a winning (small) E keeps full relative
resolution. -log(-log(u)) in fp32 knows only 2^24 values near u = 1: its tail ends at 16.6, and ties there would favour
low token ids; here the tail reaches 22.9."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from jspec.pallas.dispatch import of_platform

_ALMOST_ONE = 1 - 2.0**-24
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def uniform_of_bits(bits):
    """uint32 -> float32 strictly inside (0, 1): multiples of 2^-32 from 2^-33 up."""
    return jnp.minimum(bits.astype(jnp.float32) * 2.0**-32 + 2.0**-33, _ALMOST_ONE)


def gumbel_of_bits(bits):
    """uint32 -> float32 Gumbel noise in (-2.9, 22.9)."""
    return -jnp.log(-jnp.log1p(-uniform_of_bits(bits)))


def threefry_bits(key_0, key_1, index):
    """Words ``index`` (uint32) of ``jax.random.bits`` of keys given as two words, for code outside of kernels."""
    x_0, x_1 = threefry(key_0, key_1, index)
    return x_0 ^ x_1


def threefry_bits_unrolled(key_0, key_1, index):
    """``threefry_bits`` for the inside of a kernel."""
    x_0, x_1 = threefry_unrolled(key_0, key_1, index)
    return x_0 ^ x_1


def threefry(key_0, key_1, index):
    """The two words of Threefry-2x32 with 20 rounds (Salmon et al., 2011) of the counter (0, index), uint32.

    They are the key that ``jax.random.fold_in`` makes of the index. This function is for code outside of kernels.

    On a CPU it is JAX's own primitive, a loop over the rounds. Unrolled rounds made up nearly half of a decode program
    there, and where XLA fuses 20 rounds of a key and 20 of its bits with a reduction, LLVM does not finish in minutes in
    jax 0.11 and 0.12. On a GPU the rounds are unrolled, so that XLA fuses them with their consumers; it cannot fuse
    JAX's primitive."""
    shape = jnp.broadcast_shapes(*map(jnp.shape, (key_0, key_1, index)))
    words = (jnp.broadcast_to(word, shape) for word in (key_0, key_1, index))
    return of_platform(*words, cpu=_threefry_primitive, default=threefry_unrolled)


def _threefry_primitive(key_0, key_1, index):
    return tuple(threefry2x32_p.bind(key_0, key_1, jnp.zeros_like(index), index))


def threefry_unrolled(key_0, key_1, index):
    """``threefry`` by integer operations that lower inside a kernel."""
    keys = (key_0, key_1, key_0 ^ key_1 ^ np.uint32(0x1BD11BDA))
    x_1 = index + key_1
    x_0 = jnp.broadcast_to(key_0, jnp.shape(x_1))
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x_0 = x_0 + x_1
            x_1 = x_0 ^ _rotate_left(x_1, distance)
        x_0 = x_0 + keys[(group + 1) % 3]
        x_1 = x_1 + (keys[(group + 2) % 3] + np.uint32(group + 1))
    return x_0, x_1


def _rotate_left(x, distance: int):
    return jnp.left_shift(x, np.uint32(distance)) | jax.lax.shift_right_logical(x, jnp.full_like(x, 32 - distance))
