"""Every kind of draft head, in rounds that accept as many drafts as a test tells them to.

After any pattern of acceptance, its cache and its proposals equal those of a fresh causal pass over the committed tokens.
"""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from engines import MAX_LEN, V
from head_bench import Bench, long
from heads import VARIANTS

from jspec.models import build_head, flat_params

bench = functools.cache(Bench)


def patterns(K: int) -> dict:
    """Patterns by name: for each round a list of how many drafts each of the three rows accepts."""
    rng = np.random.default_rng(0)
    mixed = [[K, 0, K // 2], [0, K, K], [K, 1, 0], [K - 1, K, 1], [K, 0, K - 1], [1, K // 2, K]]
    return {
        "all": itertools.repeat([K] * 3),
        "none": itertools.repeat([0] * 3, 8),
        "mixed": itertools.cycle(mixed),
        "random": iter(lambda: rng.integers(0, K + 1, size=3).tolist(), None),
    }


def most(name: str) -> int:
    """The largest K that this draft head has weights for, 12 if any."""
    return VARIANTS[name].max_drafts or 12


QUICK = [
    ("eagle", 4),
    ("eagle-short", 10),  # the later passes are a loop
    ("eagle3", 4),
    ("eagle3-final-feature", 2),
    ("eagle3-bare", 3),
    ("p-eagle", 4),
    ("p-eagle-short", 10),
    ("pard", 10),
    ("mlp", 4),
    ("mlp-tied", 10),
    ("medusa", 4),
    ("dflash", 3),  # fewer drafts than the block has
    ("dflash-anchored", 3),
    ("dspark", 4),
    ("xpress", 3),
    ("xpress-causal", 8),
    ("dflash2", 3),
    ("dflash2-causal", 8),
    ("domino", 3),
    ("domino-causal", 6),
    ("domino-small", 4),
    ("lilicorr", 3),
    ("lilicorr-causal", 7),
    ("lilicorr-short", 7),
    ("domino-int8", 4),
    ("lilicorr-int8", 4),
    ("jetspec", 8),
    ("dflash-short", 8),
    ("dspark-rnn", 3),
    ("dspark-vanilla", 4),
    ("eagle-small", 4),
    ("dflash-small", 3),
    ("pard-small", 4),
    ("mlp-small", 4),
    ("medusa-rows", 3),
    ("mtp-small", 4),
    ("mtp-plain-output-small", 3),
]
THOROUGH = [(name, K) for name in VARIANTS for K in (1, 3, 8) if most(name) >= K]


@pytest.mark.parametrize("pattern", ["all", "none", "mixed", "random"])
@pytest.mark.parametrize(("name", "K"), [*QUICK, *(pytest.param(*case, marks=long) for case in THOROUGH)])
def test_cache_and_proposals_after_any_acceptance(name, K, pattern):
    drafted, state = bench(name, K).play(patterns(K)[pattern])
    assert all(k == room for k, room in drafted)
    assert sum(k for k, _ in drafted) > 2 * K
    assert pattern == "none" or (state.request.length == MAX_LEN).all()


BESIDE = [("eagle", 4), ("p-eagle-short", 8), ("dspark", 4)]
MORE = [("eagle-short", 10), ("eagle3", 4), ("pard-short", 4), ("mlp", 4), ("medusa", 4), ("mtp-two", 4)]
MORE += [("mtp", 3), ("dflash-short", 8), ("dspark-rnn", 3), ("jetspec", 4), ("domino", 4), ("lilicorr", 4)]


@pytest.mark.parametrize("pattern", ["mixed", "random"])
@pytest.mark.parametrize(("name", "K"), [*BESIDE, *(pytest.param(*case, marks=long) for case in MORE)])
def test_cache_and_proposals_beside_lookup(name, K, pattern):
    """A head reads drafts that were looked up in place of its own, and goes on from what became of them."""
    play = bench(name, K, lookup=True)
    drafted, state = play.play(patterns(K)[pattern])
    assert all(k == room for k, room in drafted)
    assert any(k for k, _ in drafted)
    assert (state.request.length == MAX_LEN).all()


@pytest.mark.parametrize(
    ("name", "K", "parameter", "at"),
    [
        (
            "eagle-short",
            10,
            "embedding",
            20,
        ),  # a draft, or a committed token, after which there is no distribution any more
        ("pard", 10, "embedding", 0),  # a token of the third prompt
        ("mlp", 4, "embeddings.2", slice(0, V, 3)),  # some tokens, if drafted second
        ("medusa", 4, "heads.2.head.weight", 0),  # the third draft, always
    ],
)
def test_drafts_end_before_the_first_without_a_distribution(name, K, parameter, at):
    """A NaN in one draft also leaves nothing behind that later rounds read, unless that token is committed."""
    play = bench(name, K)
    params = flat_params(play.head)
    params[parameter] = params[parameter].at[at].set(jnp.nan)
    drafted, state = play.play(patterns(K)["mixed"], build_head(play.config, params))
    assert (state.request.length == MAX_LEN).all()
    cut = [k for k, room in drafted if k < room]
    assert cut
    assert any(k for k, _ in drafted)
    if name == "medusa":
        assert set(cut) == {2}
