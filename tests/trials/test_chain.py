"""The chain of products, interpreted a product at a time, against plain arithmetic on bfloat16 numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic GPU kernels are written for jax 0.11")

D, F, FOLLOWING, NH, TOKENS, EPS = 256, 512, 384, 128, 8, 1e-5


def wide(x):
    return np.asarray(x, np.float32)


def rounded(x):
    return wide(jnp.asarray(x, jnp.bfloat16))


def expected(attended, x, w):
    def normed(stream, weight):
        return rounded(rounded(stream / np.sqrt(np.mean(stream**2, -1, keepdims=True) + EPS)) * wide(weight))

    h = rounded(wide(x) + rounded(wide(attended) @ wide(w.out).T))
    gate, up = np.split(rounded(normed(h, w.mlp_norm) @ wide(w.gate_up).T), 2, axis=-1)
    y = rounded(h + rounded(rounded(rounded(gate / (1 + np.exp(-gate))) * up) @ wide(w.down).T))
    return y, rounded(normed(y, w.following_norm) @ wide(w.following).T)


def test_does_what_the_products_do():
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from benchmarks.trials.chain import ROWS, Chain, Rings, run_chain

    keys = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape)  # noqa: E731
    weight = lambda *shape: (normal(*shape) * shape[1] ** -0.5).astype(jnp.bfloat16)  # noqa: E731
    norm = lambda: (1 + 0.3 * normal(D)).astype(jnp.bfloat16)  # noqa: E731
    weights = Chain(weight(D, NH), weight(2 * F, D), weight(D, F), weight(FOLLOWING, D), norm(), norm())
    attended, x = (normal(ROWS, width).astype(jnp.bfloat16) for width in (NH, D))
    got = run_chain(
        *(attended, x, weights),
        tokens=TOKENS,
        eps=EPS,
        programs=4,
        rings=Rings(6, 2),
        apart=True,
        interpret=plgpu.InterpretGPUParams(),
    )
    for one, wanted in zip(got, expected(attended[:TOKENS], x[:TOKENS], weights), strict=True):
        np.testing.assert_allclose(wide(one[:TOKENS]), wanted, atol=2**-6 * np.abs(wanted).max())


def test_layers_of_attention_and_chains_do_what_layers_do():
    """Two layers of one row and of several, their first tokens among them."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from benchmarks.trials.__main__ import AGREES, difference, layer_trial
    from benchmarks.trials.chain import Rings
    from benchmarks.trials.plan import Tiling

    tiling, interpret = Tiling(programs=4, slots=64), plgpu.InterpretGPUParams()
    both = layer_trial("tiny", 2, 3, tiling, Rings(6, 2), interpret)
    assert difference(both, layer_trial("tiny", 2, 3), lambda result: result[1], runs=1) < AGREES
