"""The objective of block drafters: against DeepSpec's own training forward, the reference implementation, and NumPy."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from causal_heads import causal_drafts
from flax import nnx
from golden_blocks import Lender, assert_close, checkpoint, golden, head_of
from golden_blocks import features as golden_features
from tiers import in_tiers
from train_toys import TARGET, V, objective, target

from jspec.config.heads.block import MARKOVS
from jspec.models import Decoder, build_head
from jspec.models.flatten import flatten
from jspec.quantization.weight import Weight
from jspec.train.block import FilledBlocks, draft_logits, filled
from jspec.train.losses import TrainingBatch, read_windows
from jspec.train.methods import Sizes, initial_params, make_objective
from jspec.train.objectives import loss_of

B, n = 2, 20
SIZES = {
    "dflash": Sizes(num_draft_tokens=3, layers=2),
    "dflash causal": Sizes(num_draft_tokens=3, layers=2),  # JetSpec's layers
    "dflash causal from the anchor": Sizes(
        num_draft_tokens=3, layers=2
    ),  # with a window, as in the speculators package
    "dflash of a part of the vocabulary": Sizes(num_draft_tokens=3, layers=1, draft_vocab_size=17),
    **{f"dspark {kind}": Sizes(num_draft_tokens=4, layers=2, markov=kind, markov_rank=6) for kind in MARKOVS},
    "dspark of a part of the vocabulary": Sizes(num_draft_tokens=3, layers=1, draft_vocab_size=17, markov_rank=6),
}
QUICK = ("dflash causal from the anchor", "dspark rnn", "dspark of a part of the vocabulary")


class GoldenTarget(Lender):
    """The target of the golden file, as far as a loss uses it."""

    def before_head(self, hidden):
        return hidden

    def scaled_logits(self, products):
        return products

    @property
    def output_weight(self):
        return Weight(self.head)


def golden_batch() -> TrainingBatch:
    """The text of the golden file as one window, of which the target has read all tokens but the last."""
    tokens = jnp.asarray(golden("dspark")["token_ids"])[None]
    hidden = jnp.asarray(golden("dspark")["S_final_normed"])[None, :-1]
    distribution = jax.nn.softmax(GoldenTarget("dspark").logits(hidden))
    return TrainingBatch(tokens, hidden, golden_features("dspark")[:, :-1], distribution, jnp.arange(1), tokens >= 0)


@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
def test_logits_and_loss_are_those_of_deepspec(tmp_path, kind):
    head, lender, found = (
        head_of(checkpoint(tmp_path / "head", "dspark", kind)),
        GoldenTarget("dspark"),
        golden("dspark"),
    )
    anchors, batch = jnp.asarray(found[f"{kind}.train_anchors"])[None], golden_batch()

    @jax.jit
    def logits_of(batch):
        return jax.lax.map(lambda one: draft_logits(head, lender, one), filled(head, lender, batch, anchors, 4.0))

    logits = logits_of(batch)
    assert_close(jnp.moveaxis(logits[:, 0], 0, 1), found[f"{kind}.train_logits"])
    trained = FilledBlocks(head.config, cross_entropy=0.1, distance=0.9, confidence=1.0)
    assert trained.decay == 4.0
    loss = jax.jit(lambda batch: trained.loss_at(head, lender, batch, anchors))(batch)
    assert float(loss) == pytest.approx(float(found[f"{kind}.train_loss"]), abs=1e-5)


@functools.cache
def made(case: str):
    """An objective of ``SIZES`` with a toy target, its head with random weights, and its constants."""
    trained: Any = make_objective(case.split()[0], TARGET, SIZES[case])
    if "causal" in case:
        anchored = "anchor" in case
        layers = dataclasses.replace(trained.config.layers, windows=(3, None)) if anchored else trained.config.layers
        of = {"causal": (True, not anchored), "windows_from_anchor": anchored, "layers": layers}
        trained = dataclasses.replace(trained, config=dataclasses.replace(trained.config, **of))
    params, constants = initial_params(trained, target(), np.arange(400) ** 2 % V, jax.random.key(0))
    rng = np.random.default_rng(1)
    noisy = {name: np.asarray(x) + 0.2 * rng.standard_normal(x.shape, np.float32) for name, x in params.items()}
    params = {name: jnp.asarray(x) for name, x in noisy.items()}
    return trained, params, constants


def windows() -> jax.Array:
    return jax.random.randint(jax.random.key(7), (B, n + 1), 0, V)


@pytest.mark.parametrize("case", in_tiers(SIZES, test=QUICK))
def test_a_block_has_the_logits_of_the_reference_implementation(case):
    trained, params, constants = made(case)
    head, K = build_head(trained.config, {**params, **constants}), trained.depths
    anchors = jnp.array([[5, 1], [n - 1, 8]])

    @jax.jit
    def logits(text):
        batch = read_windows(target(), text, trained.aux_layers, trained.known(constants))
        slots = filled(head, target(), batch, anchors, trained.decay)
        return jax.lax.map(lambda one: draft_logits(head, target(), one), slots), slots.weight

    found, weights = logits(windows())
    text = jnp.pad(windows(), ((0, 0), (0, K)), constant_values=3)
    known = trained.known(constants)
    wanted_of = jax.jit(lambda length: causal_drafts(trained.config, head, target(), text, length, K).logits)
    for block in range(anchors.shape[1]):
        wanted = wanted_of(anchors[:, block] + 1)
        if known is not None:
            wanted = wanted[..., known]
        inside = np.asarray(weights[:, :, block]) > 0
        error = np.abs(np.asarray(found[:, :, block]) - np.moveaxis(np.asarray(wanted), 1, 0)).max(axis=-1)
        assert error[inside].max() < 2e-5
    labels = n - np.asarray(anchors)  # of each anchor, up to the end of the window
    np.testing.assert_array_equal(np.sum(np.asarray(weights) > 0, axis=0), np.minimum(labels, K))


@pytest.mark.parametrize("case", ["dflash of a part of the vocabulary", "dspark of a part of the vocabulary"])
def test_loss_of_a_reduced_vocabulary_is_that_of_the_reference(case):
    """A label that is not in it adds nothing, and what the target gives to such tokens is never accepted."""
    trained, params, constants = made(case)
    trained = dataclasses.replace(trained, cross_entropy=0.3, soft=0.8, distance=0.6)
    head = build_head(trained.config, {**params, **constants})
    known, anchors = np.asarray(trained.known(constants)), np.array([[5, 1], [n - 2, 8]])

    model = target()

    @jax.jit
    def draft(text):
        batch = read_windows(model, text, trained.aux_layers, trained.known(constants))
        slots = filled(head, model, batch, jnp.asarray(anchors), trained.decay)
        return batch, slots, jax.nn.softmax(jax.lax.map(lambda one: draft_logits(head, model, one), slots))

    batch, slots, q = draft(windows())
    confidence = jax.jit(head.confidence_logits) if trained.confidence else None
    whole = np.asarray(read_windows(target(), windows(), trained.aux_layers).distribution, np.float64)
    means = []
    for row in range(B):
        total = weights = 0.0
        for block, anchor in enumerate(anchors[row]):
            for i in range(min(trained.depths, n - anchor)):
                over = np.zeros(V)
                over[known] = q[i, row, block]
                label, p = int(windows()[row, anchor + 1 + i]), whole[row, anchor + i]
                loss = -0.3 * np.log(over[label]) if label in known else 0.0
                accepted = np.minimum(p, over).sum()
                loss += 0.6 * 2 * (1 - accepted) - 0.8 * p[known] @ np.log(over[known])
                if confidence is not None:
                    said = confidence(slots.hidden[i], slots.previous[i])[row, block]
                    loss += np.logaddexp(0, said) - accepted * said
                total, weights = total + np.exp(-i / 4) * loss, weights + np.exp(-i / 4)
        means.append(total / weights)
    assert len(set(known) & set(np.asarray(windows()).ravel())) < len(set(np.asarray(windows()).ravel()))
    found = jax.jit(lambda batch: trained.loss_at(head, model, batch, anchors))(batch)
    assert float(found) == pytest.approx(np.mean(means), rel=1e-5)


@pytest.mark.parametrize("case", in_tiers(SIZES, test=QUICK))
def test_gradients_are_finite_and_reach_every_weight(case):
    trained, params, constants = made(case)
    leaves = flatten(target())
    step = jax.jit(jax.value_and_grad(loss_of(trained, leaves.merge, "float32")))
    loss, gradients = step(params, (leaves.leaves, constants), windows(), jax.random.key(0))
    assert np.isfinite(loss)
    assert all(np.isfinite(gradient).all() and np.abs(gradient).max() > 0 for gradient in gradients.values())


def test_confidence_loss_has_no_gradient_of_its_label():
    """The probability that a draft is accepted is what confidence learns; learning it must not change that probability."""
    trained, params, constants = made("dspark vanilla")
    trained = dataclasses.replace(trained, cross_entropy=0.0, soft=0.0, distance=0.0)
    leaves = flatten(target())
    gradients = jax.jit(jax.grad(loss_of(trained, leaves.merge, "float32")))(
        params, (leaves.leaves, constants), windows(), jax.random.key(0)
    )
    assert np.abs(gradients["confidence.weight"]).max() > 0
    assert not np.any(gradients["markov.out.weight"])  # it has a part in logits alone


@pytest.mark.parametrize("method", ["dspark", "dflash"])
def test_the_loss_and_the_anchors_can_be_chosen(method):
    def made_with(**chosen) -> Any:
        return make_objective(method, TARGET, Sizes(**chosen))

    def parts(trained):
        return trained.cross_entropy, trained.soft, trained.distance, trained.confidence

    said = 1 if method == "dspark" else 0
    assert parts(made_with(loss="soft")) == (0, 1, 0, said)
    assert (
        parts(made_with())
        == parts(made_with(loss="published"))
        == ((0.1, 0, 0.9, 1) if method == "dspark" else (1, 0, 0, 0))
    )
    assert (made_with().spacing, made_with(anchor_spacing=2).spacing) == (8, 2)
    with pytest.raises(ValueError, match="loss='hard': expected one of published, soft"):
        made_with(loss="hard")
    with pytest.raises(ValueError, match="anchor_spacing=0: expected an integer of at least 1"):
        made_with(anchor_spacing=0)
    with pytest.raises(ValueError, match="no such size"):
        make_objective("eagle3", TARGET, Sizes(loss="soft"))


@pytest.mark.parametrize(("length", "count"), [(64, 8), (20, 2), (7, 1), (2, 1)])
def test_anchors_are_different_and_have_a_context_and_a_label(length, count):
    trained = objective("dspark")
    batch = TrainingBatch(*[jnp.zeros((3, length, 1))] * 4, jnp.array([0, 1, 2]), jnp.ones((3, length + 1), bool))
    anchors = jax.jit(trained.anchors)
    drawn = [np.asarray(anchors(batch, jax.random.key(seed))) for seed in range(40)]
    assert {one.shape for one in drawn} == {(3, count)}
    assert all(len(set(row)) == count for one in drawn for row in one)
    assert (np.min(drawn), np.max(drawn)) == (1, length - 1)
    few = dataclasses.replace(trained, most_anchors=1).anchors(batch, jax.random.key(0))
    assert few.shape == (3, 1)
    other = dataclasses.replace(batch, numbers=jnp.array([2, 0, 1]))
    np.testing.assert_array_equal(anchors(other, jax.random.key(0)), drawn[0][[2, 0, 1]])


def test_a_new_head_reads_the_layers_that_published_ones_read():
    def config(layers: int, **sizes):
        model = dataclasses.replace(TARGET, num_layers=layers, windows=())
        return make_objective("dspark", model, Sizes(**sizes)).config

    assert config(36).aux_layers == (2, 10, 18, 26, 34)
    assert config(40).aux_layers == (2, 11, 20, 29, 38)
    assert [config(layers).aux_layers for layers in (6, 5, 3, 1)] == [(2, 3, 4), (2, 3), (1, 2), (0, 1)]
    published = config(36)
    assert (published.layers.num_layers, published.max_drafts, published.markov_rank) == (5, 7, 256)
    assert (published.markov, published.confidence, published.anchor_first) == ("vanilla", "markov", True)
    assert published.layers.qk_norm
    assert not published.own_embedding
    assert not published.own_head
    assert config(36, draft_vocab_size=17).own_head
    dflash = make_objective("dflash", TARGET, Sizes()).config
    assert (dflash.block_size, dflash.max_drafts, dflash.markov, dflash.confidence) == (8, 7, None, None)


def test_logits_of_all_drafts_are_never_in_memory():
    """The largest array of a step is the target's distribution, although the blocks make twice as many drafts as that has
    entries."""
    config = dataclasses.replace(TARGET, vocab_size=1600)  # so that logits are larger than weights
    trained: Any = make_objective("dspark", config, Sizes(num_draft_tokens=8, layers=1, markov_rank=4))
    trained = dataclasses.replace(trained, spacing=4)
    model = Decoder(config, rngs=nnx.Rngs(0))
    params, constants = initial_params(trained, model, np.arange(400), jax.random.key(0))
    step = jax.jit(jax.value_and_grad(loss_of(trained, flatten(model).merge, "float32")))
    program = step.lower(params, (flatten(model).leaves, constants), windows(), jax.random.key(0)).compile().as_text()
    shapes = re.findall(r"\bf32\[([\d,]+)\]", program)
    assert max(np.prod([int(size) for size in shape.split(",")]) for shape in shapes) == B * n * 1600
