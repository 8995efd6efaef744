"""Linear maps of a single token, whose product is computed as a reduction where the weight has a certain size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jspec.models import layers
from jspec.models.layers import Linear, project

IN, OUT = 33, 20


@pytest.fixture(autouse=True)
def reduced(monkeypatch):
    """Weights of the tests have the size that is reduced."""
    monkeypatch.setattr(layers, "_REDUCED", range(IN * OUT, IN * OUT + 1))


def linear(dtype, bias: bool) -> Linear:
    made = Linear(IN, OUT, bias=bias, dtype=dtype, rngs=nnx.Rngs(0))
    if made.bias is not None:
        made.bias[...] = jax.random.normal(jax.random.key(2), (OUT,), dtype)
    return made


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(IN,), (1, IN), (1, 1, IN), (1, 3, IN)])
@pytest.mark.parametrize(("dtype", "error"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2.0**-8)])
def test_a_map_gives_its_product(dtype, error, shape, bias):
    made, x = linear(dtype, bias), jax.random.normal(jax.random.key(1), shape, dtype)
    wanted = np.asarray(x, np.float64) @ np.asarray(made.weight[...], np.float64).T
    if made.bias is not None:
        wanted = wanted + np.asarray(made.bias[...], np.float64)
    found = made(x)
    assert (found.shape, found.dtype) == ((*shape[:-1], OUT), dtype)
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=error, atol=3 * error)


@pytest.mark.parametrize(("tokens", "width", "products"), [(1, IN, 0), (1, IN - 1, 1), (2, IN, 1)])
def test_only_single_tokens_and_weights_of_that_size_are_reduced(tokens, width, products):
    x, weight = jnp.ones((tokens, width)), jnp.ones((OUT, width))
    assert str(jax.make_jaxpr(project)(x, weight)).count("dot_general") == products
