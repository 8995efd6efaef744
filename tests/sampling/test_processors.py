"""Processors against a reference that goes through the text in Python."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lossless.distributions import Options, processed

from jspec.sampling import processors
from jspec.sampling.params import SamplingParams
from jspec.sampling.processors import Processing, Processors

B, S, J, V = 6, 20, 4, 37  # V is no multiple of 32
PROCESS = jax.jit(Processors.process)  # one program in place of one for each of its operations
OPTIONS = (
    Options(repetition_penalty=1.7),
    Options(frequency_penalty=0.6, presence_penalty=-0.9),
    Options(logit_bias=((0, 4.0), (36, -100.0), (7, 2.5)), repetition_penalty=0.8),
    Options(allowed_token_ids=(1, 5, 31, 32, 36), frequency_penalty=1.5),
    Options(bad_words=((4,), (1, 2), (2, 2, 3), (3, 1))),
    Options(),
)


def params_of(options: Options) -> SamplingParams:
    fields = dataclasses.asdict(options) | {"logit_bias": dict(options.logit_bias)}
    del fields["grammar"]
    return SamplingParams(**fields | {"bad_words": ["?"] * len(options.bad_words)})


@pytest.fixture(scope="module")
def case():
    """Texts of few different tokens, so that words repeat; prompts and completions of all lengths, one of them empty."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, size=(B, S)).astype(np.int32)
    prompt = np.array([3, 1, 8, 6, 2, 5], np.int32)
    length = prompt + np.array([0, 5, 9, 4, 12, 3], np.int32)
    drafts = rng.integers(5, size=(B, J - 1)).astype(np.int32)
    each = [Processors.of(params_of(o), n, V, o.bad_words) for o, n in zip(OPTIONS, prompt, strict=True)]
    return (
        jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *each),
        jnp.asarray(tokens),
        prompt,
        jnp.asarray(length),
        drafts,
    )


@pytest.mark.parametrize("narrow", [V, V - 5])
@pytest.mark.parametrize(("first", "count"), [(0, J), (2, 1), (1, 2)])
def test_every_position_sees_its_own_text(case, first, count, narrow):
    settings, tokens, prompt, length, drafts = case
    logits = np.random.default_rng(1).normal(size=(B, count, narrow)).astype(np.float32)
    found = PROCESS(settings, logits, tokens, length, drafts, jnp.int32(first))
    for b, options in enumerate(OPTIONS):
        text = tuple(np.asarray(tokens)[b, : length[b]].tolist())
        for j in range(count):
            history = text + tuple(drafts[b, : first + j].tolist())
            expected = processed(logits[b, j], history, int(prompt[b]), options)
            np.testing.assert_allclose(found[b, j], expected, atol=2e-6)
    np.testing.assert_array_equal(found[5], logits[5])  # bit for bit


def test_without_drafts_every_position_sees_the_committed_text(case):
    settings, tokens, prompt, length, _ = case
    logits = np.random.default_rng(1).normal(size=(B, 2, V)).astype(np.float32)
    found = PROCESS(settings, logits, tokens, length)
    for b, options in enumerate(OPTIONS[:4]):  # bad words stand at positions, not in texts
        text = tuple(np.asarray(tokens)[b, : length[b]].tolist())
        for j in range(2):
            np.testing.assert_allclose(found[b, j], processed(logits[b, j], text, int(prompt[b]), options), atol=2e-6)


def test_bfloat16_stays_bfloat16(case):
    settings, tokens, _, length, _ = case
    logits = jnp.ones((B, 1, V), jnp.bfloat16)
    assert PROCESS(settings, logits, tokens, length).dtype == jnp.bfloat16


def test_processors_with_a_text_that_fills_its_row(case):
    """Drafts that have no slot are dropped, and do not overwrite the last token."""
    settings, tokens, prompt, _, drafts = case
    logits = np.zeros((B, 1, V), np.float32)
    found = PROCESS(settings, logits, tokens, np.full(B, S, np.int32), drafts)
    for b, options in enumerate(OPTIONS):
        expected = processed(logits[b, 0], tuple(tokens[b].tolist()), int(prompt[b]), options)
        np.testing.assert_allclose(found[b, 0], expected, atol=2e-6)


@pytest.mark.parametrize("settings", [None, Processors.none(1, V)])
@pytest.mark.parametrize(("min_length", "first_allowed"), [(0, 0), (8, 0), (9, 1), (10, 2), (99, 3)])
def test_stop_tokens_wait_for_min_length(settings, min_length, first_allowed):
    one = lambda x: np.array([x], np.int32)  # noqa: E731
    processing = Processing(settings, one([3, -1]), one(min_length), np.zeros((1, S), np.int32), one(8))  # pyright: ignore
    found = np.asarray(jax.jit(Processing.apply)(processing, np.zeros((1, 3, V), np.float32)))
    assert (found[0, :, 3] == [-np.inf if i < first_allowed else 0 for i in range(3)]).all()
    assert (np.delete(found, 3, axis=2) == 0).all()


@pytest.mark.parametrize(
    ("options", "words", "message"),
    [
        ({"logit_bias": {V: 1}}, (), f"p: logit_bias has token {V}: expected token ids in 0..{V - 1}"),
        ({"allowed_token_ids": [V]}, (), f"p: allowed_token_ids has token {V}: expected"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, (), "p: logit_bias has 1025 entries: expected at most 1024"),
        ({}, [(1, i) for i in range(65)], "p: bad_words are 65 sequences of several tokens, .*: expected at most 64"),
        ({}, [tuple(range(17))], "p: bad_words has one of 17 tokens: expected at most 16"),
    ],
)
def test_values_beyond_the_room_are_refused(options, words, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        processors.check(SamplingParams(**options), 2000 if "1025" in message else V, words, "p")


def test_values_that_just_fit_are_taken():
    bias, words = {i: float(i % 7) for i in range(1024)}, [(1, i) for i in range(64)]
    params = SamplingParams(logit_bias=bias, bad_words="a")
    processors.check(params, 1024, words, "p")
    settings = jax.tree.map(lambda x: np.asarray(x)[None], Processors.of(params, 0, 1024, words))
    found = PROCESS(settings, np.zeros((1, 1, 1024), np.float32), np.ones((1, 4), np.int32), np.array([1], np.int32))[
        0, 0
    ]
    np.testing.assert_array_equal(found, [-np.inf] * 64 + [i % 7 for i in range(64, 1024)])
