"""The attention of branches, compared with one large mask over all slots, and with the drafters when they serve."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from causal_heads import logits_of
from train_toys import HEADS, TARGET, V, head_params, module, objective, target

from jspec.config import Speculation
from jspec.drafting.base import Context, Prompt
from jspec.drafting.methods import drafter_for
from jspec.models.cache_pools import LayerKV
from jspec.models.kv_cache import PagedView
from jspec.pallas.attention.reference import grouped_attention
from jspec.pallas.attention.spec import AttentionSpec
from jspec.sampling.distribution import Warp
from jspec.sampling.processors import Processing
from jspec.sampling.streams import RoundNoise
from jspec.train.losses import read_windows
from jspec.train.ttt_attention import Branches

B, n, N, G, H = 2, 9, 4, 2, 6


@pytest.mark.parametrize("window", [None, 3, 1])
@pytest.mark.parametrize("sinks", [None, (-2.0, 0.0, 1.0, 20.0)], ids=["plain", "sinks"])
def test_depth_by_depth_equals_one_attention_with_a_mask_over_all_slots(window, sinks):
    spec = AttentionSpec(window, sinks=None if sinks is None else jnp.array(sinks))
    order = jax.random.permutation(jax.random.key(0), n).astype(jnp.int32)
    counts = (n, 6, 4, 3)
    bases = [jnp.arange(n, dtype=jnp.int32), *(order[:m] for m in counts[1:])]
    draws = [jax.random.normal(jax.random.key(m), (3, B, m, N, H)) for m in counts]

    @jax.jit
    def attend(draws):
        cache, outputs = (), []
        for depth, (at, (q, k, v)) in enumerate(zip(bases, draws, strict=True)):
            view = Branches(at, depth)
            cache = view.write(cache, k[:, :, :G], v[:, :, :G])
            outputs.append(view.attend(q, cache, spec))
        return jnp.concatenate(outputs, axis=1)

    q, k, v = jnp.concatenate(draws, axis=2)
    base = np.concatenate(bases)
    depth = np.repeat(np.arange(4), counts)
    position = base + depth
    text = (depth == 0)[None] & (base[None] <= base[:, None])
    own = (depth > 0)[None] & (base[None] == base[:, None]) & (depth[None] <= depth[:, None])
    mask = text | own
    if window is not None:
        mask &= position[None] > position[:, None] - window
    mask[:n, n:] = False
    expected = jax.jit(grouped_attention)(
        q, *(jnp.moveaxis(x[:, :, :G], 2, 0) for x in (k, v)), jnp.broadcast_to(mask, (B, *mask.shape)), spec
    )
    np.testing.assert_allclose(attend(draws), expected, rtol=0, atol=2e-6)


def test_positions_are_base_plus_depth():
    view = Branches(jnp.array([4, 0, 2], jnp.int32), 3)
    np.testing.assert_array_equal(view.positions(2), [[7, 3, 5]] * 2)
    assert jax.tree.leaves(view)[0].dtype == jnp.int32


def test_a_depth_cannot_be_written_before_the_one_above_it():
    k = jnp.zeros((1, 2, G, H))
    with pytest.raises(AssertionError):
        Branches(jnp.arange(2), 1).write((), k, k)
    assert isinstance(Branches(jnp.arange(2), 0).write((), k, k)[0], LayerKV)


@pytest.mark.parametrize("method", ["eagle3", "mtp", "parallel", "mlp", "medusa"])
def test_a_branch_in_training_has_the_logits_of_a_served_round(method):
    """The logits of every draft that a round makes after a text equal those of the branch at the same slot.

    The drafts are fed back as the windows' tokens, so training and serving read the same tokens.
    """
    trained, K, length = objective(method), 3, 11
    params = head_params(method)
    text = jax.random.randint(jax.random.key(2), (1, length), 0, V)
    tokens, logits = served(method, text, K)

    @jax.jit
    def branch_logits(windows):
        known = jnp.nonzero(params["draft_ids"] >= 0, size=trained.config.draft_vocab_size)[0] if reduced else None
        batch = read_windows(target(), windows, trained.aux_layers, known)
        drafts = trained.drafts(head, target(), batch, jax.random.key(3))
        return [one.logits[0, jnp.argmax(one.bases == length - 2)] for one in drafts][:K]

    reduced = "draft_ids" in params
    head = module(method)
    if method == "parallel":  # keep every branch, so that the one in question is among them
        trained = dataclasses.replace(trained, keep=1.0)
    windows = jnp.concatenate([text, tokens, jnp.zeros((1, 6), jnp.int32)], axis=1)
    ours = np.stack(branch_logits(windows))
    if reduced:
        known = np.flatnonzero(params["draft_ids"] >= 0)
        assert np.isneginf(np.delete(logits, known, axis=-1)).all()
        logits = logits[:, known]
    np.testing.assert_allclose(ours, logits, rtol=0, atol=1e-5)
    assert len({tuple(draft.round(3)) for draft in ours}) == K  # K different distributions


def served(method: str, text, K: int) -> tuple[jax.Array, np.ndarray]:
    """The K greedy drafts that a served round makes after ``text`` int32 ``[1, length]``: drafts ``[1, K]``, logits
    ``[K, V]``."""
    make = drafter_for(HEADS[method], TARGET, Speculation(num_draft_tokens=K))
    head = module(method)
    drafter = make(target(), head.prepare())
    length = text.shape[1]

    @jax.jit
    def propose(text):
        table = jnp.arange(1, 9, dtype=jnp.int32)[None]
        positions = jnp.arange(length - 1, dtype=jnp.int32)[None]
        view = PagedView(table, positions, jnp.ones_like(positions, bool))
        features = read_windows(target(), text, drafter.aux_layers).features
        state = drafter.init(9, 8, jnp.float32, 1)
        state = drafter.prefill(state, Prompt(text[:, :-1], text[:, 1:], features, view))
        one = functools.partial(jnp.full, (1,))
        context = Context(
            tokens=jnp.pad(text, ((0, 0), (0, 20))),
            length=one(length),
            previous=one(length - 1),
            features=jnp.pad(features[:, -1:], ((0, 0), (0, K), (0, 0))),
            live=one(True),
            room=one(K),
            table=table,
            warp=Warp(one(0.0), one(0), one(1.0), one(0.0)),
            processing=Processing(None, jnp.full((1, 1), -1), one(0), text, one(length)),
            noise=RoundNoise(jnp.zeros((1, 2), jnp.uint32), one(length)),
        )
        _, proposal = drafter.propose(state, context)
        return proposal.tokens, logits_of(proposal.distribution)[0]

    tokens, logits = propose(text)
    return tokens, np.asarray(logits)
