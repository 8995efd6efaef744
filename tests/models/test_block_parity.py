"""Block drafters compute what their original implementations do, from checkpoints in the originals' layouts.

The outputs of the originals are stored in golden/, and the README.md there says how they were made."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from causal_heads import refined_logits
from golden_blocks import Lender, assert_close, checkpoint, features, golden, head_of
from safetensors.numpy import load_file, save_file

from jspec.config.heads.block import MARKOVS
from jspec.models.cache_pools import init_pool
from jspec.models.heads.block import BlockView
from jspec.models.heads.sequential import Slots
from jspec.models.kv_cache import PagedView
from jspec.train.block_attention import Anchored

PAGE, PAGES = 4, 8


def rounds(head, file: str, starts=None):
    """Hidden states of the blocks at some anchors ``[rounds, B, D]`` in the order of a text, and the cache behind them.

    The context of the first is written as that of a prompt, and that of the others as that of the tokens of a round."""
    starts = golden(file)["starts"] if starts is None else starts
    return jax.jit(lambda features: _rounds(head, file, list(map(int, starts)), features))(features(file))


def _rounds(head, file: str, starts: list[int], features):
    lender = Lender(file)
    config, tokens = head.config, golden(file)["token_ids"]
    fused, n = head.fuse(features), config.block_size
    table = 1 + jnp.arange(PAGES - 1, dtype=jnp.int32)[None]
    cache, num_written, hidden = init_pool(head.cache_shape(), PAGES, PAGE, jnp.float32), 0, []
    for start in starts:
        first = max(start - n - 1, 0)  # a window is read once more than it has to be
        if num_written == 0 and first:
            positions = jnp.arange(first, dtype=jnp.int32)[None]
            cache = head.write_kv(fused[:, :first], positions, cache, PagedView(table, positions, positions >= 0))
        positions = jnp.arange(first, start + n, dtype=jnp.int32)[None]
        block = jnp.asarray([[tokens[start], *[config.mask_token_id] * (n - 1)]])
        view = BlockView(table, positions, positions >= 0, block=n)
        context = fused[:, first:start]
        out, cache = head(context, head.embed(block, lender), positions, cache, view)
        hidden.append(out[0])
        num_written = start
    return jnp.stack(hidden), cache


def slots(pool, count: int):
    """Numbers of the first slots of the only row, ``[count, G, H]``."""
    return np.moveaxis(np.asarray(pool)[:, 1:].reshape(pool.shape[0], -1, pool.shape[-1])[:, :count], 0, 1)


def test_dflash_agrees_with_its_original(tmp_path):
    head, original = head_of(checkpoint(tmp_path / "head", "dflash")), golden("dflash")
    config = head.config
    assert (config.method, config.aux_layers, config.max_drafts) == ("dflash", (2, 5, 7), 4)
    assert_close(head.fuse(features("dflash"))[0], original["ctx"])
    hidden, cache = rounds(head, "dflash")
    assert_close(hidden, original["block_hidden"])
    assert_close(head.draft_logits(hidden, Lender("dflash"))[:, 1:], original["draft_logits"])
    for layer, kv in enumerate(cache):
        assert_close(slots(kv.k, 18), original["ctx_k"][layer])
        assert_close(slots(kv.v, 18), original["ctx_v"][layer])


def test_dflash_drafts_after_one_token(tmp_path):
    head = head_of(checkpoint(tmp_path / "head", "dflash"))
    hidden, _ = rounds(head, "dflash", [1])
    assert_close(head.draft_logits(hidden, Lender("dflash"))[0, 1:], golden("dflash")["draft_logits_ctx1"])


def test_jetspec_agrees_with_its_original(tmp_path):
    settings = {**json.loads(str(golden("dflash")["config_json"]))["dflash_config"], "causal_head": True}
    head = head_of(checkpoint(tmp_path / "head", "dflash", dflash_config=settings))
    assert head.config.causal == (True, True)
    hidden, _ = rounds(head, "dflash")
    assert_close(head.draft_logits(hidden, Lender("dflash"))[:, 1:], golden("dflash")["draft_logits_causal"])


def test_dflash_whose_anchor_drafts_agrees_with_its_original(tmp_path):
    """DeepSpec's blocks in z-lab's class, which alone would mean that the first slot drafts nothing."""
    keys = {"architectures": ["DFlashDraftModel"], "markov_rank": 0, "query_zero_predicts_next": True}
    folder, original, lender = checkpoint(tmp_path / "head", "dspark", **keys), golden("dspark"), Lender("dspark")
    weights = load_file(folder / "model.safetensors")
    weights = {name: array for name, array in weights.items() if "confidence" not in name}
    save_file(weights, folder / "model.safetensors")
    head = head_of(folder)
    assert (head.config.method, head.config.anchor_first, head.config.max_drafts) == ("dflash", True, 5)
    hidden, _ = rounds(head, "dspark")
    assert_close(head.draft_logits(hidden, lender), original["base_logits"])


def dflash2_checkpoint(folder: Path, **keys) -> Path:
    """The DFlash head of its golden file with the convolutions and the selector of a DFlash2 head."""
    config = json.loads(str(golden("dflash2")["config_json"]))
    folder = checkpoint(folder, "dflash", block_size=None, **{**config, **keys})
    weights = {name.removeprefix("w."): array for name, array in golden("dflash2").items() if name.startswith("w.")}
    save_file(load_file(folder / "model.safetensors") | weights, folder / "model.safetensors")
    return folder


SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6}
WINDOWS = {
    **SLIDING,
    "is_causal": False,
    "windows_from_anchor": True,
}  # as the speculators package, which computed them


@pytest.mark.parametrize(("end", "keys"), [("", {}), ("_windows", WINDOWS)])
def test_dflash2_agrees_with_its_original(tmp_path, end, keys):
    head, original, lender = head_of(dflash2_checkpoint(tmp_path / "head", **keys)), golden("dflash2"), Lender("dflash")
    config = head.config
    assert (config.method, config.max_drafts, config.causal) == ("dflash", 4, (False, False))
    assert (config.conv_taps, config.conv_group, config.selector_rank, config.candidates) == (3, 4, 8, 5)
    hidden, _ = rounds(head, "dflash")
    assert_close(hidden, original[f"block_hidden{end}"])
    logits, hidden = head.draft_logits(hidden, lender)[:, 1:], hidden[:, 1:]
    values, tokens = head.selector.candidates(logits)
    previous = jnp.asarray(golden("dflash")["token_ids"])[golden("dflash")["starts"]][:, None]
    for i in range(config.max_drafts):
        at = slice(i, i + 1)
        scores = jax.jit(head.selector.scores)(hidden[:, at], previous, values[:, at], tokens[:, at])
        if not end:
            np.testing.assert_array_equal(tokens[:, i], original["candidates"][:, i])
            assert_close(scores[:, 0], original["scores"][:, i])
        previous = jnp.take_along_axis(tokens[:, i], jnp.argmax(scores[:, 0], axis=-1, keepdims=True), axis=1)
        np.testing.assert_array_equal(previous[:, 0], original[f"greedy_tokens{end}"][:, i])
    if not end:
        assert_close(logits, original["draft_logits"])


@pytest.mark.parametrize("case", ["dflash", "dflash-both-ways", "dflash2"])
def test_windows_are_those_of_z_labs_package(tmp_path, case):
    """Counted from each slot, in causal layers and others."""
    keys = SLIDING if case == "dflash" else {**SLIDING, "is_causal": False}
    write = dflash2_checkpoint if case == "dflash2" else functools.partial(checkpoint, file="dflash")
    head = head_of(write(tmp_path / "head", **keys))
    assert head.config.causal == (False, case == "dflash")
    assert (head.config.windows_by_slot, head.config.windows_from_anchor) == (case != "dflash", False)
    assert_close(rounds(head, "dflash")[0], golden("zlab_windows")[case])


@pytest.mark.parametrize(("case", "passes"), [("windows", 6), ("anchor-first", 2)])
def test_xpress_agrees_with_its_original(tmp_path, case, passes):
    """Its own folders: windows of a causal layer, which begin before the anchor, and a draft vocabulary."""
    file = f"xpress/{case}"
    head, original, lender = head_of(checkpoint(tmp_path / "head", file)), golden(file), Lender(file)
    config, first = head.config, int(case == "windows")
    assert (config.method, config.max_drafts, config.refine_passes) == ("xpress", 5 - first, passes)
    assert (config.causal, config.windows_from_anchor) == (((True, False), True) if first else ((False, False), False))
    hidden, _ = rounds(head, file)
    assert_close(hidden, original["block_hidden"])
    text = jnp.broadcast_to(jnp.asarray(original["token_ids"])[None], (len(hidden), 24))
    logits, length = head.draft_logits(hidden, lender)[:, first:], jnp.asarray(original["starts"]) + 1
    ids = np.arange(97) if head.draft_ids is None else np.flatnonzero(np.asarray(head.draft_ids[...]) >= 0)
    after = jax.jit(refined_logits, static_argnums=0)
    inputs = head.refiner.inputs(hidden, jnp.ones(hidden.shape[:2], bool))
    for done, expected in enumerate(original["rounds"]):
        mean = jnp.mean(hidden, axis=1, keepdims=True)
        refined = after(dataclasses.replace(config, refine_passes=done + 1), head, hidden, mean, logits, text, length)
        assert_close(refined, expected[:, first:])
        previous = original["rounds"][done - 1][:, first:] if done else logits
        known = [text[0, length - 1 - back] for back in range(first, -1, -1)]
        before = jnp.concatenate([jnp.stack(known, axis=1), ids[np.argmax(previous, axis=-1)][:, :-1]], axis=1)
        assert_close(logits + head.refiner(inputs, before, first), expected[:, first:])
    assert len({str(np.argmax(some[:, first:], axis=-1)) for some in original["rounds"]}) > 1  # a pass corrects drafts


@pytest.mark.parametrize("kind", MARKOVS)
def test_dspark_agrees_with_its_original(tmp_path, kind):
    head, original, lender = head_of(checkpoint(tmp_path / "head", "dspark", kind)), golden("dspark"), Lender("dspark")
    config = head.config
    assert (config.method, config.aux_layers, config.max_drafts, config.markov) == ("dspark", (0, 3, 6), 5, kind)
    hidden, _ = rounds(head, "dspark")
    assert_close(hidden, original["block_hidden"])
    base = head.draft_logits(hidden, lender)
    assert_close(base, original["base_logits"])

    @jax.jit
    def after(previous):
        state, logits = head.markov.no_state(len(previous)), []
        for i in range(config.block_size):
            added, state = head.markov(hidden[:, i : i + 1], previous[:, i : i + 1], state)
            logits.append(base[:, i : i + 1] + added)
        return jnp.concatenate(logits, axis=1)

    anchors = original["token_ids"][original["starts"]]
    greedy = original[f"{kind}.greedy_tokens"]
    previous = jnp.asarray(np.concatenate([anchors[:, None], greedy[:, :-1]], axis=1))
    logits = after(previous)
    assert_close(logits, original[f"{kind}.logits"])
    np.testing.assert_array_equal(np.argmax(logits, axis=-1), greedy)
    assert_close(head.confidence_logits(hidden, previous), original[f"{kind}.confidence_logits"])
    forced = jnp.broadcast_to(jnp.asarray(original["token_ids"][9:14])[None], previous.shape)
    assert_close(after(forced)[0], original[f"{kind}.forced_logits_start9"])


def corrected(folder: Path, case: str, **settings):
    """A head that Model Optimizer wrote, and the logits of its drafts as a function of the anchor and the drafts before
    them, ``[4, n] -> [4, n, V]``. A setting replaces one of ``dflash_config``."""
    file = f"model_optimizer/{case}"
    original, lender = golden(file), Lender(file)
    nested = json.loads(str(original["config_json"]))["dflash_config"] | settings
    head = head_of(checkpoint(folder, file, dflash_config=nested))
    config, starts, first = head.config, original["starts"], 0 if head.config.anchor_first else 1
    hidden, _ = rounds(head, file)
    assert_close(hidden, original["block_hidden"])
    logits = head.draft_logits(hidden, lender)
    assert_close(logits, original["base_logits"])
    context = head.fuse(features(file))[0, starts - 1][:, None]
    known = jnp.ones((len(starts), config.max_drafts), bool)
    slots = Slots(hidden[:, first:], logits[:, first:], known, context, lambda tokens: head.embed(tokens, lender))

    @jax.jit
    def after(before):
        (state, read), found = head.sequential.start(slots), []
        for i in range(config.max_drafts):
            state, one = read(state, before[:, i : i + 1], i)
            found.append(one)
        return jnp.concatenate(found, axis=1)

    return head, after


@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_domino_agrees_with_its_original(tmp_path, prefix):
    """After the text's own tokens."""
    head, after = corrected(tmp_path / "head", "domino", pure_draft_prefix_len=prefix)
    config, original = head.config, golden("model_optimizer/domino")
    assert (config.method, config.max_drafts, config.domino.uncorrected) == ("dflash", 5, prefix)
    logits = after(original["token_ids"][original["starts"][:, None] + np.arange(5)])
    assert_close(logits, original[f"logits_{prefix}"])
    assert np.abs(logits - original["base_logits"])[:, prefix:].max() > 0.1


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_dspark_of_model_optimizer_agrees_with_its_original(tmp_path, kind):
    """After the text's own tokens. Its Markov and confidence heads have names of their own."""
    head, after = corrected(tmp_path / "head", f"dspark-{kind}")
    original = golden(f"model_optimizer/dspark-{kind}")
    assert (head.config.method, head.config.max_drafts, head.config.markov) == ("dspark", 5, kind)
    before = original["token_ids"][original["starts"][:, None] + np.arange(5)]
    assert_close(after(before), original["logits"])
    assert (head.config.confidence == "markov") == (kind == "gated")
    if kind == "gated":
        assert_close(head.confidence_logits(original["block_hidden"], before), original["confidence"])


@pytest.mark.parametrize("case", ["windows", "windows-causal"])
def test_windows_of_model_optimizer_agree_with_their_original(tmp_path, case):
    """Windows of all layers, each of which reaches back from its own slot; and the same in training."""
    file, is_causal = f"model_optimizer/{case}", case != "windows"
    head, original = head_of(checkpoint(tmp_path / "head", file)), golden(f"model_optimizer/{case}")
    config = head.config
    assert (config.layers.windows, config.causal) == ((6, 6), (is_causal,) * 2)
    assert (config.windows_by_slot, config.windows_from_anchor) == (not is_causal, False)
    hidden, _ = rounds(head, file)
    assert_close(hidden, original["block_hidden"])
    assert_close(head.draft_logits(hidden, Lender(file)), original["base_logits"])
    n, anchors = config.block_size, jnp.asarray(original["starts"])[None]
    blocks = jnp.full((1, 4, n), config.mask_token_id).at[:, :, 0].set(original["token_ids"][original["starts"]])
    view = Anchored(anchors, n)
    fill = jax.jit(lambda x, e: head(head.fuse(x), e, view.positions(24), (None,) * 2, view)[0])
    trained = fill(features(file), head.embed(blocks.reshape(1, -1), Lender(file)))
    assert_close(trained.reshape(4, n, -1), original["block_hidden"])
    other = head_of(checkpoint(tmp_path / "other", file, windows_from_anchor=True))
    assert (other.config.windows_by_slot, other.config.windows_from_anchor) == (False, is_causal)
    assert np.abs(rounds(other, file)[0] - original["block_hidden"]).max() > 0.05


@pytest.mark.parametrize("case", ["lilicorr", "lilicorr-convolved"])
def test_lilicorr_agrees_with_its_original(tmp_path, case):
    """After each candidate as the draft before, and after a token that is none: then by their log-probabilities."""
    head, after = corrected(tmp_path / "head", case)
    original = golden(f"model_optimizer/{case}")
    config, candidates = head.config, original["candidates"]
    assert (config.method, config.max_drafts, config.conv_taps > 0) == ("dflash", 4, case != "lilicorr")
    anchors, k = original["token_ids"][original["starts"]][:, None], candidates.shape[-1]
    for index in range(k):
        logits = after(np.concatenate([anchors, candidates[:, :-1, index]], axis=1))
        assert np.isneginf(logits).sum() == 4 * 4 * (config.layers.vocab_size - k)
        scores = np.take_along_axis(np.asarray(logits), candidates, axis=-1)
        assert_close(scores[:, 0], original["start"])
        assert_close(scores[:, 1:], original["pair"][:, :, index])
    others = [[min(set(range(37)) - set(slot)) for slot in block[:-1]] for block in candidates.tolist()]
    logits = np.asarray(after(np.concatenate([anchors, np.array(others)], axis=1)))
    base = np.asarray(jax.nn.log_softmax(original["base_logits"][:, 1:], axis=-1))
    assert_close(*(np.take_along_axis(x[:, 1:], candidates[:, 1:], axis=-1) for x in (logits, base)))
