"""Linear maps of a single token, whose product a GPU computes as a reduction where the weight has a certain size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from matmul_rows import set_limits

from jspec.models.layers import Linear

IN, OUT = 33, 20


@pytest.fixture(autouse=True)
def reduced(monkeypatch):
    """Weights of the tests have the size that is reduced, but where a test says otherwise."""
    set_limits(monkeypatch, "one token, reduction", numbers=range(IN * OUT, 10**9), inputs=range(1, IN + 1))


def linear(dtype, bias: bool) -> Linear:
    made = Linear(IN, OUT, bias=bias, dtype=dtype, rngs=nnx.Rngs(0))
    if made.bias is not None:
        made.bias[...] = jax.random.normal(jax.random.key(2), (OUT,), dtype)
    return made


def on_any_platform(kernel, _, *args):
    return kernel(*args)


@pytest.mark.parametrize("reduction", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(IN,), (1, IN), (1, 1, IN), (1, 3, IN)])
@pytest.mark.parametrize(("dtype", "error"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2.0**-8)])
def test_a_map_gives_its_product(dtype, error, shape, bias, reduction, monkeypatch):
    if reduction:
        monkeypatch.setattr("jspec.pallas.matmul.one_token.by_platform", on_any_platform)
    made, x = linear(dtype, bias), jax.random.normal(jax.random.key(1), shape, dtype)
    wanted = np.asarray(x, np.float64) @ np.asarray(made.weight[...], np.float64).T
    if made.bias is not None:
        wanted = wanted + np.asarray(made.bias[...], np.float64)
    actual = made(x)
    assert (actual.shape, actual.dtype) == ((*shape[:-1], OUT), dtype)
    np.testing.assert_allclose(np.asarray(actual, np.float64), wanted, rtol=error, atol=3 * error)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("platform", "tokens", "width", "products"),
    [
        pytest.param("cuda", 1, IN, 0, id="reduced"),
        pytest.param("cuda", 1, IN - 1, 1, id="a small weight"),
        pytest.param("cuda", 1, IN + 1, 1, id="a long sum"),
        pytest.param("cuda", 2, IN, 1, id="two tokens"),
        pytest.param("cpu", 1, IN, 1, id="no GPU"),
    ],
)
def test_gpus_reduce_single_tokens_over_weights_of_that_size(platform, tokens, width, products, bias):
    def product(x, weight, b):
        made = Linear(width, OUT, bias=bias, dtype=x.dtype, rngs=nnx.Rngs(0))
        made.weight[...] = weight
        if made.bias is not None:
            made.bias[...] = b
        return made(x)

    traced = jax.jit(product).trace(jnp.ones((tokens, width)), jnp.ones((OUT, width)), jnp.ones(OUT))
    assert traced.lower(lowering_platforms=(platform,)).as_text().count("dot_general") == products
