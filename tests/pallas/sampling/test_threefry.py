"""The noise inside the kernels is jax.random's, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from jspec.pallas.sampling.threefry import (
    gumbel_of_bits,
    threefry,
    threefry_bits,
    threefry_bits_unrolled,
    threefry_unrolled,
    uniform_of_bits,
)
from jspec.pallas.triton import block_ids, kernel_call
from jspec.sampling.streams import RoundNoise


def _bits_block(key_ref, out_ref, *, size):
    row, block, column = pl.program_id(0), pl.program_id(1), jnp.int32(0)
    ids = block_ids(block, size).astype(jnp.uint32)
    out_ref[row, pl.ds(block * size, size)] = threefry_bits_unrolled(
        key_ref[row, column], key_ref[row, column + 1], ids
    )


def _bits_reference(key_data, size):
    return jax.vmap(lambda key: jax.random.bits(key, (size,), jnp.uint32))(jax.random.wrap_key_data(key_data))


def _bits_kernel(key_data, size, interpret=False):
    return kernel_call(
        _bits_block,
        key_data,
        grid=(key_data.shape[0], size // 64),
        out_shape=jax.ShapeDtypeStruct((key_data.shape[0], size), jnp.uint32),
        num_warps=1,
        interpret=interpret,
        size=64,
    )


def test_bits_in_a_kernel_are_those_of_jax_random(implementation):
    key_data = jax.random.key_data(jax.random.split(jax.random.key(3), 4))
    bits = implementation(functools.partial(_bits_reference, size=512), functools.partial(_bits_kernel, size=512))(
        key_data
    )
    np.testing.assert_array_equal(bits, _bits_reference(key_data, 512))


@pytest.mark.parametrize("size", [1, 2, 127, 1031])
@pytest.mark.parametrize("bits_of", [threefry_bits, threefry_bits_unrolled])
def test_bits_do_not_depend_on_the_size(size, bits_of):
    key = jax.random.key(11)
    key_0, key_1 = jax.random.key_data(key)
    bits = bits_of(key_0, key_1, jnp.arange(size, dtype=jnp.uint32))
    np.testing.assert_array_equal(bits, jax.random.bits(key, (size,), jnp.uint32))
    np.testing.assert_array_equal(bits, jax.random.bits(key, (2048,), jnp.uint32)[:size])


@pytest.mark.parametrize("bits_of", [threefry_bits, threefry_bits_unrolled])
def test_first_word_of_many_keys(bits_of):
    key_data = jax.random.key_data(jax.random.split(jax.random.key(5), (3, 4)))
    expected = _bits_reference(key_data.reshape(-1, 2), 7)[:, 0].reshape(3, 4)
    np.testing.assert_array_equal(jax.jit(bits_of)(key_data[..., 0], key_data[..., 1], jnp.uint32(0)), expected)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_outside_of_kernels_only_a_gpu_unrolls_the_rounds(platform):
    """A CPU's compiler needs very long for the unrolled rounds of a key and of its bits beside a reduction."""
    keys = jax.ShapeDtypeStruct((3, 4), jnp.uint32)
    lowered = jax.jit(threefry_bits).trace(keys, keys, keys).lower(lowering_platforms=(platform,)).as_text()
    assert ("stablehlo.while" in lowered) == (platform == "cpu")


def test_uniforms_compile_beside_a_reduction():
    """On a CPU, in every version of jax: the test hangs if it does not hold."""
    noise = RoundNoise(jax.random.key_data(jax.random.split(jax.random.key(6), 3)), jnp.arange(3, dtype=jnp.int32))
    lowest = jax.jit(lambda noise: jnp.min(noise.accept_uniforms(3), axis=1))(noise)
    np.testing.assert_array_equal(lowest, np.min(noise.accept_uniforms(3), axis=1))


@pytest.mark.parametrize("threefry_of", [threefry, threefry_unrolled])
def test_the_two_words_are_those_of_fold_in(threefry_of):
    key, data = jax.random.key(11), jnp.array([0, 1, 77, 2**31 + 5, 2**32 - 1], jnp.uint32)
    words = jnp.stack(threefry_of(*jax.random.key_data(key), data), axis=-1)
    np.testing.assert_array_equal(words, jax.vmap(lambda d: jax.random.key_data(jax.random.fold_in(key, d)))(data))


def test_transforms_stay_finite_at_both_ends():
    bits = jnp.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], jnp.uint32)
    uniform = np.asarray(uniform_of_bits(bits))
    assert (uniform > 0).all()
    assert (uniform < 1).all()
    assert (np.diff(uniform) >= 0).all()
    gumbel = np.asarray(gumbel_of_bits(bits))
    assert np.isfinite(gumbel).all()
    np.testing.assert_allclose(gumbel[[0, -1]], [22.87, -2.81], atol=0.01)


def test_gumbel_noise_has_the_moments_of_its_distribution():
    noise = np.asarray(gumbel_of_bits(jax.random.bits(jax.random.key(5), (400_000,), jnp.uint32)), np.float64)
    assert abs(noise.mean() - np.euler_gamma) < 5 * 1.2825 / np.sqrt(noise.size)
    assert abs(noise.var() - np.pi**2 / 6) < 0.03
