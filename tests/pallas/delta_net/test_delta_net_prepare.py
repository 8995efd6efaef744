"""What chunks contribute to the prefill of a gated delta net: the inverses and scores of float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from delta_nets import HEADS, random_texts

from jspec.pallas.delta_net.chunked import CHUNK
from jspec.pallas.delta_net.prefill import tiling_of
from jspec.pallas.delta_net.prepare import prepare
from jspec.pallas.delta_net.projections import split_heads

TOKENS = CHUNK + 21  # of two chunks


def wanted_of(q, k, g, beta):
    """(I + A)^-1 and Q K^T * D of a chunk, in float64: ``[Q, Q]``."""
    q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    total = np.cumsum(g)
    D = np.exp(np.where(np.tri(len(g)), total[:, None] - total[None], -np.inf))
    A = np.tril(beta[:, None] * (k @ k.T) * D, -1)
    return np.linalg.inv(np.eye(len(g)) + A), q @ k.T / np.sqrt(q.shape[-1]) * D


@pytest.mark.parametrize("keys", ["random", "nearly equal"])
def test_agrees_with_float64(keys):
    x, g, beta, _ = random_texts(1, 2 * CHUNK, seed=8)
    if keys == "nearly equal":
        x, g, beta = x[:, :1] + 1e-3 * x, g * 1e-3, jnp.full_like(beta, 0.999)
    made = prepare(jnp.int32([TOKENS]), x, g, beta, (HEADS.keys, HEADS.key_size), keys=16, num_warps=4, interpret=True)
    q, k, _ = (np.asarray(part[0], np.float64) for part in split_heads(x, HEADS))
    g, beta = (np.asarray(part[0], np.float64) for part in (g, beta))
    for head in range(HEADS.values):
        of_key = head // (HEADS.values // HEADS.keys)
        for start, end in ((0, CHUNK), (CHUNK, TOKENS)):
            chunk = slice(start, end)
            inverse, scores = wanted_of(q[chunk, of_key], k[chunk, of_key], g[chunk, head], beta[chunk, head])
            for found, wanted in ((made.inverse, inverse), (made.scores, scores)):
                found = np.asarray(found[0, head, 0, start : start + CHUNK])
                np.testing.assert_allclose(found[: end - start, : end - start], wanted, rtol=2e-5, atol=2e-6)
                assert not np.triu(found, 1).any()


@pytest.mark.parametrize(("heads", "values"), [(48, 32), (32, 16), (24, 16), (128, 64), (1, 16)])
def test_instances_have_few_columns_of_states_while_all_run_at_once(heads, values):
    assert tiling_of(heads, 128).values == values
