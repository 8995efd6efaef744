"""Pages: what is written where, and that attention over them is attention over the text."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config import NULL_PAGE
from jspec.models.cache_pools import CacheShape, LayerKV, init_pool
from jspec.models.kv_cache import CausalView, PagedView, View
from jspec.pallas.attention.reference import causal_mask
from jspec.pallas.attention.spec import AttentionSpec

G, H, N, S = 2, 4, 4, 17
attend = jax.jit(lambda view, q, kv, spec: view.attend(q, kv, spec))
write = jax.jit(lambda view, kv, k, v: view.write(kv, k, v))


def empty(pages: int, page_size: int) -> LayerKV:
    return init_pool([CacheShape(G, H)], pages, page_size, jnp.float32)[0]


def random_heads(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("page_size", [3, 17, 64])
def test_pages_in_any_order_are_the_text(page_size, window):
    """Written in two calls of different lengths to shuffled pages, beside another row that has another length."""
    M = -(-S // page_size)
    table = jnp.asarray(1 + np.random.default_rng(0).permutation(2 * M).reshape(2, M), jnp.int32)
    q, k, v = random_heads(0, 2, S, N, H), random_heads(1, 2, S, G, H), random_heads(2, 2, S, G, H)
    causal = CausalView(jnp.broadcast_to(jnp.arange(S)[None], (2, S)))
    expected = np.asarray(attend(causal, q, write(causal, None, k, v), AttentionSpec(window)))

    kv, lengths = empty(2 * M + 1, page_size), np.array([S, 9])
    for start, end in ((0, 6), (6, S)):
        positions = np.broadcast_to(np.arange(start, end, dtype=np.int32)[None], (2, end - start))
        view = PagedView(table, positions, positions < lengths[:, None])
        kv = write(view, kv, k[:, start:end], v[:, start:end])
        out = np.asarray(attend(view, q[:, start:end], kv, AttentionSpec(window)))
        for row in range(2):
            n = min(int(lengths[row]), end) - start
            np.testing.assert_allclose(out[row, :n], expected[row, start : start + n], rtol=1e-5, atol=1e-6)


def test_invalid_and_missing_slots_are_dropped():
    """Invalid tokens, positions before the text or past the table, and whatever the null page would get."""
    table = jnp.array([[2, 1, NULL_PAGE], [3, 4, 5]], jnp.int32)
    positions = jnp.array([[-1, 0, 1, 2, 3, 4, 6, 9]] * 2, jnp.int32)
    valid = jnp.array([[True, True, False, True, True, True, True, True], [False] * 6 + [True] * 2])
    new = 1.0 + jnp.broadcast_to(jnp.arange(8.0).reshape(1, 8, 1, 1), (2, 8, G, H))
    written = PagedView(table, positions, valid).write(empty(6, 3), new, -new)
    expected = np.zeros((6, 3))
    expected[2, 0], expected[2, 2], expected[1, 0], expected[1, 1] = 2, 4, 5, 6  # row 0: positions 0, 2, 3, 4
    expected[5, 0] = 7  # row 1: position 6; its position 9 is past its table
    for pool, sign in ((written.k, 1), (written.v, -1)):
        np.testing.assert_array_equal(pool, np.broadcast_to(sign * expected[None, :, :, None], (G, 6, 3, H)))


def test_slots_of_an_earlier_request_are_not_seen():
    """Slots past the newest token may hold anything, NaN and infinities included."""
    view = PagedView(jnp.array([[1, 2]], jnp.int32), jnp.arange(4, dtype=jnp.int32)[None], jnp.ones((1, 4), bool))
    q, k, v = random_heads(0, 1, 4, N, H), random_heads(1, 1, 4, G, H), random_heads(2, 1, 4, G, H)
    clean = attend(view, q, write(view, empty(3, 3), k, v), AttentionSpec())
    for left in (jnp.nan, jnp.inf, 1e30):
        used = jax.tree.map(lambda pool, left=left: jnp.full_like(pool, left), empty(3, 3))
        np.testing.assert_array_equal(attend(view, q, write(view, used, k, v), AttentionSpec()), clean)


def test_a_window_counts_the_query():
    mask = causal_mask(jnp.array([[4, 5]]), jnp.arange(7), 3)
    assert mask[0].tolist() == [[False, False, True, True, True, False, False], [False] * 3 + [True] * 3 + [False]]
    assert jnp.sum(causal_mask(jnp.array([[4]]), jnp.arange(7), None)) == 5


def test_a_pool_is_laid_out_by_heads():
    pool = init_pool([CacheShape(G, H)] * 3, pages=5, page_size=7, dtype=jnp.bfloat16)
    assert len(pool) == 3
    assert {leaf.shape for leaf in jax.tree.leaves(pool)} == {(G, 5, 7, H)}
    assert {leaf.dtype for leaf in jax.tree.leaves(pool)} == {jnp.dtype(jnp.bfloat16)}
    assert len({leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pool)}) == 6  # donated buffers appear once


@pytest.mark.parametrize(
    "method", ["write", "attend", "recur", "write_latent_kv", "attend_latents", "attend_up_projected"]
)
def test_a_method_that_a_view_lacks_is_refused_by_the_names_of_both(method):
    class OfNothing(View):
        pass

    called = getattr(OfNothing(), method)
    with pytest.raises(TypeError, match=f"OfNothing has no {method}: expected a view for layers"):
        called(*[None] * len(inspect.signature(called).parameters))
