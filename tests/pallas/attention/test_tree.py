"""Attention of trees of drafts: each query token against the text and its own path laid out as a chain, for the reference
implementation and the kernels."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import for_cuda, kernels_of, shapes_of_queries
from paged_problems import MERGED, SHARED, WHOLE, Case, G, _arguments, assert_agrees, in_bytes
from trees_of_drafts import TREES, tree_problem

from jspec.models.cache_pools import LayerKV
from jspec.models.kv_cache import PagedView, View
from jspec.models.ragged_view import RaggedView
from jspec.pallas.attention.decode import decode_attention_kernel
from jspec.pallas.attention.fp8 import KVScales
from jspec.pallas.attention.paged import paged_attention_kernel, paged_attention_reference
from jspec.pallas.attention.reference import Rotation
from jspec.pallas.attention.spec import AttentionSpec, PagedQueries, TreeMask
from jspec.pallas.attention.table import TABLE, Attention
from jspec.pallas.dispatch import explain, row_of
from jspec.pallas.mla.attention import latent_attention


class TestTrees:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        def attend(case: Case, args):
            kernel = functools.partial(paged_attention_kernel, tiling=case.tiling)
            return implementation(paged_attention_reference, kernel)(*args, case.spec)

        self.attend = attend

    @pytest.mark.parametrize("case", TREES, ids=str)
    def test_a_token_sees_the_text_and_its_own_path(self, case):
        args, wanted = tree_problem(case)
        assert_agrees(self.attend(case, args), args, *wanted)

    @pytest.mark.parametrize("window", [None, 3, 30])
    def test_a_tree_of_one_branch_has_the_bits_of_a_chain(self, window):
        """A window that is smaller than the tree is deep included."""
        case = Case(T=8, R=4, H=64, P=16, pages=9, window=window)
        args, wanted = tree_problem(case, chain=True)
        *qkv, queries = args
        got, chain = (self.attend(case, (*qkv, each)) for each in (queries, queries._replace(tree=None)))
        valid = np.asarray(queries.valid)
        np.testing.assert_array_equal(np.asarray(got)[valid], np.asarray(chain)[valid])
        assert_agrees(got, args, *wanted)

    @pytest.mark.parametrize(
        "tiling", [None, SHARED, dataclasses.replace(MERGED, instances=64)], ids=["own", "shared", "ring"]
    )
    @pytest.mark.parametrize("window", [None, 30])
    def test_a_tree_goes_on_in_another_pass(self, window, tiling):
        """The last query tokens alone, of which a pass before has written what they follow, as the drafts of a level."""
        case = Case(T=40, R=2, H=64, P=16, pages=9, window=window, tiling=tiling)
        (q, *pools, queries), wanted = tree_problem(case)
        last = slice(case.T - 5, None)
        tree = queries.tree._replace(
            positions=queries.tree.positions[:, last], ancestors=queries.tree.ancestors[:, last]
        )
        some = queries._replace(positions=queries.positions[:, last], valid=queries.valid[:, last], tree=tree)
        args = q[:, last], *pools, some
        assert_agrees(self.attend(case, args), args, *(x[:, last] for x in wanted))

    def test_a_tree_that_is_read_as_a_chain_is_detected(self):
        (*qkv, queries), wanted = tree_problem(TREES[0])
        args = (*qkv, queries._replace(tree=None))
        with pytest.raises(AssertionError):
            assert_agrees(self.attend(TREES[0], args), args, *wanted)


RING = dataclasses.replace(MERGED, instances=64)  # parts of a window are stored


@pytest.mark.parametrize("tiling", [SHARED, MERGED, RING], ids=["shared", "merged", "ring"])
@pytest.mark.parametrize("case", TREES[:3:2], ids=str)
def test_however_instances_share_a_row(case, tiling):
    args, wanted = tree_problem(case)
    assert_agrees(paged_attention_kernel(*args, case.spec, tiling=tiling, interpret=True), args, *wanted)


@functools.cache
def arguments(case: Case):
    """The rows of ``tree_problem``, their newest tokens not in the cache yet."""
    (_, *pools, queries), _ = tree_problem(case)
    *args, view = _arguments(case, *pools, queries)
    return *args, dataclasses.replace(view, tree=queries.tree)


ROUNDS = [
    *((case, None) for case in TREES),
    (Case(T=32, R=4, H=32, P=16, pages=7), None),  # several blocks of queries
    (Case(T=16, R=8, H=32, P=16, pages=6, window=40, dtype="bfloat16", tiling=WHOLE), None),
    (Case(T=12, R=2, H=64, P=16, pages=6, window=20), "heads"),
    (Case(T=12, R=2, H=64, P=16, pages=6, sink=1.0), "tokens"),
]


@pytest.mark.parametrize(
    "interpret", [pytest.param(True, id="interpreted"), pytest.param(False, id="compiled", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(("case", "kind"), ROUNDS, ids=str)
def test_a_round_agrees_with_rope_write_and_attention_apart(case, kind, interpret):
    qkv, rotation, kv, view = arguments(case)
    kv = kv if kind is None else in_bytes(kv, kind)
    wanted, wanted_kv = jax.jit(lambda *args: View.extend(view, *args, G, case.spec))(qkv, rotation, kv)
    how = {"scales": kv.scales, "tiling": case.tiling, "interpret": interpret}
    out, *written = decode_attention_kernel(qkv, rotation, kv.k, kv.v, view.queries, case.spec, **how)
    valid, tolerance = np.asarray(view.valid), 2**-6 if case.dtype == "bfloat16" else 3e-5
    x, y = (np.asarray(o, np.float32)[valid] for o in (out, wanted))
    assert np.isfinite(y).all()
    np.testing.assert_allclose(x, y, atol=tolerance)
    np.testing.assert_array_equal(np.asarray(out)[~valid], 0)
    for x, y in zip(jax.tree.leaves(kv.with_written(*written)), jax.tree.leaves(wanted_kv), strict=True):
        x, y = (np.asarray(array, np.float32)[:, 1:] if array.ndim > 1 else array for array in (x, y))
        same = np.isclose(x, y, rtol=2**-7 if case.dtype == "bfloat16" else 1e-6, atol=1e-6, equal_nan=True)
        assert same.mean() > 0.995 if kind else same.all()  # keys may round to a neighbour


def shapes_of_tree(B, T, M) -> PagedQueries:
    tree = jax.ShapeDtypeStruct((B, T), jnp.int32), jax.ShapeDtypeStruct((B, T, -(-T // 32)), jnp.uint32)
    root = jax.ShapeDtypeStruct((B,), jnp.int32)
    return shapes_of_queries(B, T, M)._replace(tree=TreeMask(*tree, root))  # pyright: ignore


def shapes_of_pools(B, M, P=64, H=128, rounding=None):
    pool = jax.ShapeDtypeStruct((8, 1 + B * M, P, H), jnp.bfloat16 if rounding is None else jnp.uint8)
    scale = jax.ShapeDtypeStruct(pool.shape[:1] if rounding == "heads" else pool.shape[:3], jnp.float32)
    return LayerKV(pool, pool, None if rounding is None else KVScales(scale, scale))  # pyright: ignore


@pytest.mark.parametrize("rounding", [None, "heads", "tokens"])
@pytest.mark.parametrize(("T", "R", "window"), [(16, 4, 100), (64, 4, None), (64, 8, 100)])
def test_trees_lower_for_cuda(T, R, window, rounding):
    """``PagedView.extend`` is one launch, and another that merges, for up to 64 queries of a KV head, and two for more."""
    M, array = 16, jax.ShapeDtypeStruct
    queries, kv = shapes_of_tree(1, T, M), shapes_of_pools(1, M, rounding=rounding)
    qkv, angle = array((1, T, 8 * (R + 2), 128), jnp.bfloat16), array((1, T, 64), jnp.float32)

    def extend(queries, qkv, rotation, kv):
        view = PagedView(*queries[:3], tree=queries.tree)
        return view.extend(qkv, rotation, kv, 8, AttentionSpec(window))

    kernels = kernels_of(for_cuda(extend, (queries, qkv, Rotation(angle, angle), kv)))  # pyright: ignore
    launches = ["decode_split"] if T * R <= 64 else ["attend_split", "rope_and_write_kv"]
    assert sorted({*kernels} - {"merge_splits"}) == launches


def test_kernels_of_many_tokens_serve_no_tree(monkeypatch):
    monkeypatch.setattr("jspec.pallas.attention.table.on_hopper", lambda: True)
    q = jax.ShapeDtypeStruct((64, 64, 32, 128), jnp.bfloat16)
    for rounding, name in ((None, "many tokens"), ("heads", "many tokens over bytes")):
        case = Attention(q, shapes_of_pools(64, 16, rounding=rounding).k, shapes_of_queries(64, 64, 16), may_widen=True)
        tree = case._replace(queries=shapes_of_tree(64, 64, 16))
        assert [row_of(TABLE, each).name for each in (case, tree)] == [name, "pages"]
        assert "tree" in (explain(TABLE, tree)[name] or "")


def test_what_takes_no_tree_says_so():
    (q, k, v, queries), _ = tree_problem(TREES[0])
    with pytest.raises(ValueError, match="tree='TreeMask': expected None"):
        latent_attention(q[:, :, :, :32], k[:1, :, :, :32], queries, rank=16, scale=1.0)
    with pytest.raises(AssertionError, match="no trees"):
        RaggedView.of(PagedView(*queries[:3], tree=queries.tree), 8)
    large = shapes_of_tree(6, 65, 4)
    q = jax.ShapeDtypeStruct((6, 65, 2, 64), q.dtype)
    for attend in (paged_attention_reference, functools.partial(paged_attention_kernel, interpret=True)):
        with pytest.raises(
            ValueError, match="tree='65 tokens in 3 words': expected at most 64 tokens, in one or two words"
        ):
            jax.eval_shape(functools.partial(attend, spec=AttentionSpec()), q, k, v, large)
