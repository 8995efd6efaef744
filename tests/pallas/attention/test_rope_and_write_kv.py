"""Rotation and cache writes in one launch, against the two of them one after another."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_problems import CASES, Case, G, arguments

from jspec.models.kv_cache import View
from jspec.pallas.attention.rope_and_write_kv import rope_and_write_kv_kernel

LONG = Case(T=70, R=3, H=32, P=16, pages=8)  # heads that do not fill an integer number of program instances
MODES = [pytest.param(True, id="interpreted"), pytest.param(False, id="compiled", marks=pytest.mark.gpu)]


def kernel_and_reference(qkv, rotation, kv, view, interpret=True):
    """What the kernel gives, and what the reference implementation gives: queries, keys and values."""
    q, *pools = rope_and_write_kv_kernel(qkv, rotation, *kv[:2], view.queries, interpret=interpret)
    wanted_q, wanted = jax.jit(lambda *args: View.rope_and_write_kv(*args, G))(view, qkv, rotation, kv)
    return (q, *pools), (wanted_q, *wanted[:2])


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("case", [*CASES, LONG], ids=str)
def test_agrees_with_rope_and_write_apart(case, interpret):
    args = arguments(case)
    got, wanted = kernel_and_reference(*args, interpret=interpret)
    tolerance = 2**-7 if case.dtype == "bfloat16" else 1e-6
    assert not np.isnan(np.asarray(got[0], np.float32)).any()
    for x, y in zip(
        (got[0], *(pool[:, 1:] for pool in got[1:])), (wanted[0], *(p[:, 1:] for p in wanted[1:])), strict=True
    ):
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("interpret", MODES)
def test_tokens_without_a_slot_are_written_nowhere(interpret):
    qkv, rotation, kv, view = arguments(LONG)
    beyond = jnp.full_like(view.positions, LONG.P * LONG.pages)
    elsewhere = [
        dataclasses.replace(view, valid=jnp.zeros_like(view.valid)),
        dataclasses.replace(view, positions=jnp.full_like(view.positions, -1)),
        dataclasses.replace(view, positions=beyond),
        dataclasses.replace(view, table=jnp.zeros_like(view.table)),
    ]
    for nowhere in elsewhere:
        (_, *pools), _ = kernel_and_reference(qkv, rotation, kv, nowhere, interpret)
        for pool, before in zip(pools, kv[:2], strict=True):
            np.testing.assert_array_equal(pool[:, 1:], before[:, 1:])
