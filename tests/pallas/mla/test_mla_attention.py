"""Attention over latents against a float64 oracle that reads the text slot by slot, for its reference implementation and
its kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from latent_attention import CASES, by_hand, oracle, problem
from normals import normal

from jspec.config import Rope
from jspec.models.cache_pools import LayerKV
from jspec.models.kv_cache import PagedView
from jspec.models.layers import rotation_at
from jspec.pallas.attention.spec import PagedQueries
from jspec.pallas.mla.attention import IN_PAGES, latent_attention_kernel, latent_attention_reference
from jspec.pallas.mla.norm_rope_write_kv import norm_rope_latents, norm_rope_write_kv_kernel


class TestLatentAttention:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        self.attend = lambda case, scale: implementation(
            functools.partial(latent_attention_reference, rank=case.rank, scale=scale),
            functools.partial(latent_attention_kernel, rank=case.rank, scale=scale, tiling=case.tiling),
        )

    @pytest.mark.parametrize("scale", [0.1, 0.02])
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_equals_the_oracle(self, case, scale):
        args, text = problem(case)
        q, _, (_, positions, valid, _) = jax.tree.map(np.asarray, args)
        got = np.asarray(self.attend(case, scale)(*args), np.float64)
        wanted = oracle(case, q, text, positions, valid, scale)
        error = np.abs(got - wanted)[valid].max()
        assert error < (1e-5 if case.dtype == "float32" else 0.02)

    def test_neighbours_change_nothing(self):
        """Each row alone gives the same bits as among others."""
        case = CASES[1]
        args, _ = problem(case)
        q, pool, queries = args
        attend = jax.jit(self.attend(case, 0.1))
        together = attend(*args)
        other = attend(q[::-1], pool, PagedQueries(*(x[::-1] for x in queries[:3])))[::-1]
        keep = np.asarray(queries.valid)
        np.testing.assert_array_equal(np.asarray(together)[keep], np.asarray(other)[keep])


def write_reference(compressed, query_weight, latent_weight, eps, rotation, pool, tokens):
    """What ``norm_rope_write_kv_kernel`` does, composed of the functions that define it."""
    q, latents = norm_rope_latents(compressed, query_weight, latent_weight, eps, rotation)
    return q, PagedView(*tokens[:3]).write(LayerKV(pool, None), latents[:, :, None], None).k


class TestNormRopeWriteKV:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        self.norm_rope_write = implementation(
            functools.partial(write_reference, eps=1e-6), functools.partial(norm_rope_write_kv_kernel, eps=1e-6)
        )

    @pytest.mark.parametrize("queries", [None, 24, 40])
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_equals_numpy(self, case, queries):
        """A row at the end of its table, rows with invalid tokens, and null pages, into which nothing is written."""
        (_, pool, (table, positions, valid, _)), _ = problem(case)
        pool = jnp.nan_to_num(pool)
        table = jnp.where(table >= pool.shape[1], 0, table).at[2, 0].set(0)
        (B, T), rng = positions.shape, np.random.default_rng(case.T)
        width = (queries or 24) + case.rank + case.rotated
        compressed = normal(rng, (B, T, width), case.dtype)
        query_weight = None if queries is None else normal(rng, queries, case.dtype, mean=1)
        latent_weight = normal(rng, case.rank, case.dtype, mean=1)
        rotation = rotation_at(positions, Rope(theta=100.0), case.rotated)
        write = functools.partial(self.norm_rope_write, compressed, query_weight, latent_weight)
        q, actual = write(rotation=rotation, pool=pool, tokens=PagedQueries(table, positions, valid))
        wanted_q, wanted = by_hand(compressed, query_weight, latent_weight, rotation, pool, table, positions, valid)
        tolerance = 1e-5 if case.dtype == "float32" else 0.04
        np.testing.assert_allclose(np.asarray(q, np.float64), wanted_q, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(np.asarray(actual, np.float64), wanted, rtol=tolerance, atol=tolerance)
        assert (wanted != np.asarray(pool, np.float64)).any()


@pytest.mark.parametrize(
    ("rank", "rotated", "dtype", "known"),
    [
        (512, 64, "bfloat16", True),
        (32, 16, "float32", True),
        (24, 16, "float32", False),
        (512, 8, "bfloat16", False),
        (1024, 64, "bfloat16", False),
        (512, 64, "float16", False),
    ],
)
def test_the_kernel_is_for_powers_of_two(rank, rotated, dtype, known):
    H = rank + rotated
    q, pool = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((1, 1, 4, H), (1, 3, 16, H)))
    assert IN_PAGES.serves(q, pool, rank) is known
