"""The losses against NumPy, the slots that conditional drop computes, and the initial weights of draft heads."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from train_toys import SIZES, TARGET, V, Vd, head_params, module, objective, target

from jspec.config import Rope
from jspec.config.heads import default_aux_layers
from jspec.models import Decoder, flat_params
from jspec.models.flatten import flatten
from jspec.models.kv_cache import CausalView
from jspec.train.initial_weights import frequent_tokens, output_head_of
from jspec.train.losses import DepthLogits, TrainingBatch, draft_loss, float32_logits, read_windows, soft_cross_entropy
from jspec.train.methods import Sizes, initial_params, make_objective
from jspec.train.objectives import loss_of

B, n = 2, 12


def log_softmax(x) -> np.ndarray:
    x = np.asarray(x, np.float64)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.fixture(scope="module")
def windows():
    return jax.random.randint(jax.random.key(7), (B, n + 1), 0, V)


def test_soft_cross_entropy_is_that_of_the_formula():
    logits = 3 * jax.random.normal(jax.random.key(0), (4, 5))
    distribution = jax.nn.softmax(jax.random.normal(jax.random.key(1), (4, 5)))
    part = distribution.at[:, 0].set(
        0.0
    )  # token 0 has probability under the target, but is not in the draft vocabulary
    for p in (distribution, part):
        expected = -(np.asarray(p, np.float64) * log_softmax(logits)).sum(-1)
        np.testing.assert_allclose(soft_cross_entropy(p, logits), expected, rtol=1e-5)


def test_a_draft_is_compared_with_the_target_at_its_own_position_and_left_out_past_the_window():
    distribution = jax.nn.softmax(2 * jax.random.normal(jax.random.key(0), (B, n, V)))
    bases = [np.arange(n), np.array([7, n - 1, 2, n - 2, 0]), np.array([7, n - 1, 2])]
    logits = [jax.random.normal(jax.random.key(i), (B, len(at), V)) for i, at in enumerate(bases)]
    nothing = jnp.zeros((B, n, 1))
    batch = TrainingBatch(
        jnp.zeros((B, n + 1), jnp.int32), nothing, nothing, distribution, jnp.arange(B), jnp.ones((B, n + 1), bool)
    )
    depths = [DepthLogits(jnp.asarray(at), x) for at, x in zip(bases, logits, strict=True)]
    means = []
    for d, (at, x) in enumerate(zip(bases, logits, strict=True)):
        inside = [i for i, b in enumerate(at) if b + d + 1 < n]
        p, q = np.asarray(distribution)[:, at[inside] + d + 1], log_softmax(x)[:, inside]
        means.append(-(p * q).sum(-1).mean())
    assert len(inside) == 2
    expected = sum(0.8**d * mean for d, mean in enumerate(means)) / (1 + 0.8 + 0.64)
    assert draft_loss(batch, depths, 0.8) == pytest.approx(expected, rel=1e-5)
    assert draft_loss(batch, depths[:1], 0.3) == pytest.approx(means[0], rel=1e-5)


def test_eagle_loss_is_feature_regression_plus_cross_entropy(windows):
    trained = dataclasses.replace(objective("eagle"), noise=0.0)
    head = module("eagle")

    @jax.jit
    def parts(windows):
        batch = read_windows(target(), windows, ())
        positions = jnp.broadcast_to(jnp.arange(n)[None], (B, n))
        hidden, _ = head(target().embed(windows[:, 1:]), batch.features, positions, (None,), CausalView(positions))
        return trained.loss(head, target(), batch, jax.random.key(0)), hidden, batch, target().logits(hidden)

    loss, hidden, batch, logits = parts(windows)
    gap = np.abs(np.asarray(hidden[:, :-1] - batch.hidden[:, 1:], np.float64))
    distance = np.where(gap < 1, 0.5 * gap**2, gap - 0.5).mean()
    entropy = -(np.asarray(batch.distribution[:, 1:]) * log_softmax(logits[:, :-1])).sum(-1).mean()
    assert loss == pytest.approx(distance + 0.1 * entropy, rel=1e-5)


def test_eagle_adds_noise_to_features(windows):
    trained, leaves = objective("eagle"), flatten(target())
    loss = jax.jit(loss_of(trained, leaves.merge, "float32"))
    params, frozen = head_params("eagle"), (leaves.leaves, {})
    one, same, other = (float(loss(params, frozen, windows, jax.random.key(seed))) for seed in (0, 0, 1))
    assert one == same != other
    assert one == pytest.approx(other, rel=0.05)


def test_the_target_distribution_is_restricted_to_the_draft_vocabulary(windows):
    known = jnp.array([2, 3, 30])
    batch = read_windows(target(), windows, (1, 3), known)
    hidden, features, _ = target().with_auxiliary(
        windows[:, :-1],
        jnp.arange(n)[None],
        (None,) * 3,
        CausalView(jnp.broadcast_to(jnp.arange(n)[None], (B, n))),
        (1, 3),
    )
    np.testing.assert_allclose(batch.distribution, jax.nn.softmax(target().logits(hidden))[..., known], atol=1e-6)
    np.testing.assert_allclose(batch.features, features, atol=1e-5)
    assert batch.features.shape == (B, n, 2 * TARGET.hidden_size)
    assert (batch.distribution.sum(-1) < 0.9).all()


def test_number_of_branches_that_conditional_drop_keeps_at_each_depth():
    trained = dataclasses.replace(objective("parallel"), depths=9, keep=0.7, floor=0.2)
    counts = trained.kept(100)
    assert counts == (100, 70, 49, 35, 25, 20, 20, 20, 20)
    assert trained.kept(3) == (3, 3, 2, 2, 1, 1, 1, 1, 1)


def test_the_bases_of_a_depth_are_a_prefix_of_those_above(windows):
    trained, head = objective("parallel"), module("parallel")
    batch = jax.eval_shape(lambda w: read_windows(target(), w, trained.aux_layers), windows)
    batch = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), batch)
    depths = jax.jit(lambda key: list(trained.drafts(head, target(), batch, key)))(jax.random.key(0))
    assert [len(one.bases) for one in depths] == list(trained.kept(n)) == [12, 10, 8, 7]
    assert [one.logits.shape for one in depths] == [(B, m, Vd) for m in trained.kept(n)]
    np.testing.assert_array_equal(depths[0].bases, np.arange(n))
    for deeper, one in zip(depths[2:], depths[1:-1], strict=True):
        np.testing.assert_array_equal(deeper.bases, one.bases[: len(deeper.bases)])
    assert len(set(depths[1].bases.tolist())) == len(depths[1].bases)
    assert depths[1].bases.tolist() != sorted(
        depths[1].bases.tolist()
    )  # drawn at random, not the first ones of the text


def test_dropped_slots_are_not_computed():
    leaves, params = flatten(target()), head_params("parallel")
    constants = {"draft_ids": params.pop("draft_ids")}
    text = jnp.zeros((B, 65), jnp.int32)

    def flops(keep: float, depths: int) -> float:
        trained = dataclasses.replace(objective("parallel"), keep=keep, floor=0.0, depths=depths)
        loss = jax.jit(loss_of(trained, leaves.merge, "float32"))
        lowered = loss.lower(params, (leaves.leaves, constants), text, jax.random.key(0))
        cost = lowered.cost_analysis()
        assert cost is not None
        return cost["flops"]

    text_only = flops(1.0, 1)
    everything, dropped = (flops(keep, 4) - text_only for keep in (1.0, 0.5))
    assert dropped < 0.4 * everything  # (1/2 + 1/4 + 1/8) / 3 is 0.29


@pytest.mark.parametrize("method", SIZES)
def test_weights_start_from_the_target(method):
    text = np.array([3] * 5 + [9] * 4 + [1] * 3 + list(range(V)))
    params, constants = initial_params(objective(method), target(), text, jax.random.key(0))
    assert params.keys() | constants.keys() == flat_params(module(method)).keys()
    assert all(leaf.dtype == jnp.float32 for leaf in params.values())
    theirs = [id(leaf) for leaf in jax.tree.leaves(flatten(target()).leaves)]
    assert not any(id(leaf) in theirs for leaf in params.values())  # the first step donates them
    if constants:
        known = np.flatnonzero(constants["draft_ids"] >= 0)
        np.testing.assert_array_equal(params["head.weight"], target().head.weight[...][known])
    if method == "medusa":
        assert all(np.all(leaf == 0) for name, leaf in params.items() if "blocks" in name)
        np.testing.assert_array_equal(params["heads.2.head.weight"], target().head.weight[...])
    if method in ("dspark", "dflash", "mtp"):
        name = "norms.0.weight" if method == "mtp" else "norm.weight"
        np.testing.assert_array_equal(params[name], target().output_norm)
    if method == "parallel":
        assert np.std(params["mask_hidden"]) > 0.5


def test_the_draft_vocabulary_is_the_most_frequent_tokens_in_the_order_of_their_ids():
    rows = frequent_tokens(np.array([4, 4, 4, 1, 1, 6, 6, 0, 5]), vocab_size=8, count=4)
    np.testing.assert_array_equal(rows, [0, 1, -1, -1, 2, -1, 3, -1])  # 0 and 5 are as frequent: the lower id
    assert rows.dtype == np.int32
    np.testing.assert_array_equal(frequent_tokens(np.array([2]), vocab_size=3, count=3), [0, 1, 2])


def test_aux_layers_are_those_of_eagle3_where_the_target_is_deep_enough():
    def aux_layers(layers: int) -> tuple[int, ...]:
        return make_objective("eagle3", dataclasses.replace(TARGET, num_layers=layers, windows=()), Sizes()).aux_layers

    assert aux_layers(32) == default_aux_layers(32) == (2, 16, 29)
    assert (aux_layers(6), aux_layers(3), aux_layers(2), aux_layers(1)) == ((1, 3, 5), (1, 2), (1,), (0, 1))


@pytest.mark.parametrize(
    ("method", "sizes", "message"),
    [
        ("eagle", Sizes(layers=2), "layers=2: expected nothing, a head of method 'eagle' has no such size"),
        ("medusa", Sizes(tie=True), "tie=True: expected nothing"),
        ("eagle3", Sizes(draft_vocab_size=V + 1), rf"draft_vocab_size=32: expected an integer in 1\.\.{V}"),
        ("parallel", Sizes(aux_layers=(1, 4)), r"aux_layers=\(1, 4\): expected at most 3, the target's layers"),
        ("eagle3", Sizes(aux_layers=(2, 1)), r"aux_layers=\(2, 1\): expected 2 layer ids of at least 0, ascending"),
        ("mlp", Sizes(inner_size=0), "inner_size=0: expected"),
        ("medusa", Sizes(num_draft_tokens=0), "num_draft_tokens=0: expected an integer of at least 1"),
        ("dflash", Sizes(markov="rnn"), "markov='rnn': expected nothing, a head of method 'dflash' has no such size"),
        ("dspark", Sizes(markov="lstm"), "markov='lstm': expected one of vanilla, gated, rnn"),
        ("dspark", Sizes(markov_rank=0), "markov_rank=0: expected an integer of at least 1 with a Markov head"),
        ("dspark", Sizes(aux_layers=(1, 4)), r"aux_layers=\(1, 4\): expected at most 3, the target's layers"),
        ("dflash", Sizes(draft_vocab_size=V + 1), rf"draft_vocab_size=32: expected an integer in 1\.\.{V}"),
        ("dflash", Sizes(num_draft_tokens=0), "num_draft_tokens=0: expected an integer of at least 1"),
        ("dflash", Sizes(layers=0), "layers=0: expected"),
        ("hydra", Sizes(), "method='hydra': expected one of dspark, dflash, eagle3, parallel, eagle, mtp, mlp, medusa"),
    ],
)
def test_invalid_sizes_are_refused(method, sizes, message):
    with pytest.raises(ValueError, match=message):
        make_objective(method, TARGET, sizes)


def test_an_eagle_head_needs_attention_heads_that_divide_its_width():
    with pytest.raises(ValueError, match="D / N = 18 / 4 numbers: expected an even number; use eagle3"):
        make_objective("eagle", dataclasses.replace(TARGET, hidden_size=18), Sizes())


@pytest.mark.parametrize(
    "choices",
    [{}, {"logit_divisor": 4.0}, {"logit_softcap": 0.5, "logit_divisor": 2.0}, {"embedding_size": 6}],
    ids=str,
)
def test_logits_by_the_output_head_of_the_target_are_the_targets(choices):
    model = Decoder(dataclasses.replace(TARGET, **choices), rngs=nnx.Rngs(0))
    hidden = jax.random.normal(jax.random.key(0), (B, n, TARGET.hidden_size))
    logits = model.logits(hidden)
    np.testing.assert_allclose(float32_logits(hidden, None, model), logits, rtol=1e-5, atol=1e-6)
    if "embedding_size" in choices:
        with pytest.raises(ValueError, match="output head reads 6 numbers and its hidden states have 16"):
            output_head_of(model)
    elif "logit_softcap" not in choices:
        start = jnp.einsum("bnd,vd->bnv", hidden, output_head_of(model), precision="highest")
        np.testing.assert_allclose(start, logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (Rope(theta=5e5, kind="linear", factor=2.0), Rope(theta=5e5, kind="linear", factor=2.0)),
        (Rope(theta=5e5, fraction=0.5), Rope(theta=5e5)),
        (Rope(theta=5e5, kind="longrope", short_factors=(1.0, 2.0), long_factors=(3.0, 4.0)), Rope(theta=5e5)),
        (None, Rope()),
    ],
)
def test_a_head_rotates_in_a_way_that_its_layout_can_state(rope, expected):
    model = dataclasses.replace(TARGET, rope=rope, position_offset=2 if rope is None else None)
    assert make_objective("eagle", model, Sizes()).config.layers.rope == expected
