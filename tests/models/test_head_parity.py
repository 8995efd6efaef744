"""Each kind of draft head computes what its original implementation does.

The outputs of the originals are stored in golden/, and the README.md there says how they were made.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import causal
from golden_blocks import Lender, checkpoint, golden, head_of
from tiny import tiny_checkpoint
from tiny_heads import CASES, MASK

from convert import convert, load_draft, load_folder
from jspec.config.heads import default_aux_layers
from jspec.models import build, build_head
from jspec.models.cache_pools import init_pool
from jspec.models.kv_cache import CausalView, PagedView
from jspec.sampling.draft_vocabulary import DraftVocabulary

TOLERANCE = 2e-5
STREAMS = {"final-hidden": "final", "layer-ids": "streams-1-3-7", "speculators-layer-ids": "streams-1-6"}


TOKENS = golden("target")["tokens"]
T = len(TOKENS) - 1  # slot i reads feature i and token i + 1


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    config, params = load_folder(
        tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=7, num_hidden_layers=8), "float32"
    )
    return build(config, params)


def load_case(folder, file: str, case: str):
    """The draft head of a case, read from disk, and the outputs of the original by their names."""
    write, keys = CASES[file][case]
    path = write(folder / "head", **keys)
    if "pickle" in case:
        path = convert(path, folder / "converted", allow_pickle=True, verify="shapes").out
    said = {"layer-ids": {"aux_convention": "input_of"}, "norm-output": {"norm_output": "recycled"}}
    config, params = load_draft(path, **said.get(case, {}))
    expected = {name.removeprefix(f"{case}/"): a for name, a in golden(file).items() if name.startswith(f"{case}/")}
    return build_head(config, params), expected


def features_of(file: str, case: str):
    return jnp.asarray(golden("target")["final" if file == "eagle" else STREAMS.get(case, "streams-2-4-5")])


def assert_close(actual, expected):
    assert actual.shape == expected.shape
    assert np.abs(np.asarray(actual) - expected).max() < TOLERANCE * np.abs(expected).max()


def likeliest(head, logits) -> int:
    """The likeliest token of logits ``[1, Vd]``."""
    index = int(jnp.argmax(logits))
    vocabulary = DraftVocabulary.of(head.prepare())
    return index if vocabulary is None else int(vocabulary.tokens[index])


FED_BACK = [(file, case) for file in ("eagle", "eagle3") for case in CASES[file]]


def test_the_targets_features_are_those_of_the_originals(target):
    positions = jnp.arange(T, dtype=jnp.int32)[None]
    for aux_layers in ((1, 6), (1, 3, 7), default_aux_layers(8)):
        hidden, streams, _ = target.with_auxiliary(
            TOKENS[None, :T], positions, (None,) * 8, CausalView(positions), aux_layers
        )
        assert_close(streams[0], golden("target")["streams-" + "-".join(map(str, aux_layers))])
    assert_close(hidden[0], golden("target")["final"])


@pytest.mark.parametrize(("file", "case"), FED_BACK)
def test_a_causal_pass_agrees_with_the_original(tmp_path, target, file, case):
    head, expected = load_case(tmp_path, file, case)
    positions = jnp.arange(T, dtype=jnp.int32)[None]

    @jax.jit
    def causal_pass(tokens, features):
        embedded, fused = head.embed(tokens, target), head.fuse(features)
        hidden, _ = head(embedded, fused, positions, (None,) * len(head.cache_shape()), CausalView(positions))
        return hidden, head.logits(hidden, target)

    hidden, logits = causal_pass(TOKENS[None, 1:], features_of(file, case)[None])
    assert_close(hidden[0], expected["hidden"])
    assert_close(logits[0], expected["logits"])


def two_passes(head, target, tokens, features, following, then=None):
    """Row j reads slots 0 .. j, and then, in slot j + 1, its own output and one more token.

    Args:
      tokens, features: int32 ``[1, T]`` and ``[1, T, E]``, that the slots read.
      following: int32 ``[T, 1]``, the token that slot j + 1 reads.
      then: the head that reads slot j + 1, if it is another one.

    Returns:
      the hidden state ``[T, D]`` of slot j + 1, and its logits.
    """
    then, T = then or head, tokens.shape[1]
    row = jnp.arange(T, dtype=jnp.int32)
    table, slots = 1 + row[:, None], jnp.broadcast_to(row[None], (T, T))
    pool = init_pool(head.cache_shape(), 1 + T, 2 * T, jnp.float32)
    embedded, fused = head.embed(jnp.broadcast_to(tokens, (T, T)), target), head.fuse(features)
    view = PagedView(table, slots, slots <= row[:, None])
    hidden, cache = head(embedded, jnp.broadcast_to(fused, (T, *fused.shape[1:])), slots, pool, view)
    own, after = head.recycle(hidden[row, row][:, None]), row[:, None] + 1
    hidden, _ = then(head.embed(following, target), own, after, cache, PagedView(table, after, after > 0))
    return hidden[:, 0], head.logits(hidden, target)[:, 0]


@pytest.mark.parametrize(("file", "case"), FED_BACK)
def test_a_recycled_feature_agrees_with_the_original(tmp_path, target, file, case):
    head, expected = load_case(tmp_path, file, case)
    passes = jax.jit(functools.partial(two_passes, head, target))
    hidden, logits = passes(TOKENS[None, 1:], features_of(file, case)[None], expected["next-tokens"][:, None])
    assert_close(hidden, expected["next-hidden"])
    assert_close(logits, expected["next-logits"])


def test_a_window_of_an_eagle3_layer_is_that_of_the_original_for_the_first_draft(tmp_path):
    """For the second draft, training has one more of the oldest tokens: its window begins where the first draft's does."""
    path, original = checkpoint(tmp_path / "head", "eagle3_windows"), golden("eagle3_windows")
    head, (config, params) = head_of(path), load_draft(path)
    window, _ = config.layers.windows
    wider = build_head(
        dataclasses.replace(config, layers=dataclasses.replace(config.layers, windows=(6, None))), params
    )
    assert config.layers.windows == (5, None)
    text, features = original["token_ids"][None], original["features"][None]
    slots = jnp.arange(features.shape[1], dtype=jnp.int32)[None]

    @jax.jit
    def first_pass(tokens, features):
        hidden, _ = head(head.embed(tokens, None), head.fuse(features), slots, (None,) * 2, CausalView(slots))
        return head.logits(hidden, None)

    assert_close(first_pass(text[:, 1:], features)[0], original["logits"])
    second_pass = jax.jit(lambda *read: [two_passes(head, None, *read, then)[1] for then in (head, wider)])
    served, trained = second_pass(text[:, 1:], features, np.append(text[0, 2:], 0)[:, None])
    assert_close(trained, original["next_logits"])
    cut = window - 1  # the first slot of the first draft behind which the second one sees not all tokens
    assert_close(served[:cut], original["next_logits"][:cut])
    assert np.abs(served - original["next_logits"])[cut:].max(axis=-1).min() > 0.01


@pytest.mark.parametrize(("file", "case"), [key for key in FED_BACK if f"{key[1]}/chain" in golden(key[0])])
def test_greedy_drafts_are_those_of_the_originals_loop(tmp_path, target, file, case):
    head, expected = load_case(tmp_path, file, case)
    table, slots = jnp.ones((1, 1), jnp.int32), jnp.arange(T, dtype=jnp.int32)[None]
    pool, valid = init_pool(head.cache_shape(), 2, 2 * T, jnp.float32), jnp.ones((1, T), bool)

    @jax.jit
    def first_pass(tokens, features):
        embedded, fused = head.embed(tokens, target), head.fuse(features)
        return head(embedded, fused, slots, pool, PagedView(table, slots, valid))

    @jax.jit
    def next_pass(token, hidden, position, cache):
        embedded, features = head.embed(token, target), head.recycle(hidden[:, -1:])
        return head(embedded, features, position, cache, PagedView(table, position, valid[:, :1]))

    hidden, cache = first_pass(TOKENS[None, 1:], features_of(file, case)[None])
    drafts, logits = [], jax.jit(lambda hidden: head.logits(hidden[:, -1], target))
    for slot in range(T, T + len(expected["chain"])):
        drafts.append(likeliest(head, logits(hidden)))
        hidden, cache = next_pass(jnp.array([drafts[-1:]]), hidden, jnp.full((1, 1), slot, jnp.int32), cache)
    assert drafts == expected["chain"].tolist()


@pytest.mark.parametrize("case", ["llama", "llama-two-layers", "qwen3"])
def test_eagle_with_norms_agrees_with_its_original(tmp_path, case):
    """Folders that NeMo Automodel wrote; each of three drafts reads the output of the one before, which is normed."""
    file, (first, length) = f"nemo_automodel/{case}", (9, 3)
    head, original, lender = head_of(checkpoint(tmp_path / "head", file)), golden(file), Lender(file)
    c = head.config
    assert (c.norms, c.fuse_bias, c.layers.num_layers, any(c.layers.windows)) == (
        (True, True, 2, False) if "two" in case else (True, False, 1, False)
    )
    text = jnp.asarray(original["token_ids"])
    tokens, positions = jnp.roll(text, -1).at[-1].set(0)[None], jnp.arange(len(text), dtype=jnp.int32)[None]

    @jax.jit
    def causal_pass(features):
        embedded, cache = head.embed(tokens, lender), (None,) * len(head.cache_shape())
        hidden, _ = head(embedded, head.fuse(features), positions, cache, CausalView(positions))
        return hidden, head.logits(hidden, lender)

    features = jnp.asarray(original["features"])[None]
    hidden, logits = causal_pass(features)
    assert_close(hidden[0], original["hidden"])
    assert_close(logits[0], original["logits"])
    for i in range(first, first + length):
        features = features.at[:, i + 1].set(head.recycle(hidden)[:, i])
        hidden, logits = causal_pass(features)
    assert_close(logits[0, first + 1 : first + length + 1], original["chain"])


@pytest.mark.parametrize("case", CASES["p_eagle"])
def test_mask_slots_agree_after_every_prefix(tmp_path, target, case):
    """Row j has real slots 0 .. j and mask slots from j + 1 on."""
    head, expected = load_case(tmp_path, "p_eagle", case)
    head = head.prepare()
    rows, K = expected["logits"].shape[:2]
    slots = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (rows, T))
    real = slots <= jnp.arange(rows)[:, None]
    features = head.fuse(features_of("p_eagle", case)[None])
    features = jnp.where(real[:, :, None], features, head.mask_feature[...].reshape(1, 1, -1))
    embedded = head.embed(jnp.where(real, TOKENS[None, 1:], head.config.mask_token_id), target)
    hidden, _ = head(embedded, features, slots, (None,) * len(head.cache_shape()), CausalView(slots))
    logits = head.logits(hidden, target)
    assert_close(np.stack([logits[row, row : row + K] for row in range(rows)]), expected["logits"])


def test_pard_fills_mask_tokens(tmp_path):
    model, expected = load_case(tmp_path, "pard", "llama")
    K = len(expected["logits"])
    tokens = np.concatenate([TOKENS, np.full(K - 1, MASK)])
    assert_close(causal(model)(tokens[None])[0, -K:], expected["logits"])


@pytest.mark.parametrize("case", CASES["mlp_speculator"])
def test_stages_of_an_mlp_speculator_agree(tmp_path, case):
    head, expected = load_case(tmp_path, "mlp_speculator", case)
    stages, rows, _ = expected["logits"].shape
    state, logits = head.start(golden("target")["final"][None, :rows]), []
    for i in range(stages):
        state = head.stage(i, state, TOKENS[None, 1 + i : 1 + i + rows])
        logits.append(head.logits(i, state)[0])
    assert_close(jnp.stack(logits), expected["logits"])


@pytest.mark.parametrize("case", CASES["medusa"])
def test_medusa_heads_agree(tmp_path, target, case):
    head, expected = load_case(tmp_path, "medusa", case)
    heads, rows, _ = expected["logits"].shape
    logits = head.logits(jnp.asarray(golden("target")["final"])[None, :rows], target, heads)
    assert_close(jnp.moveaxis(logits[0], 1, 0), expected["logits"])
