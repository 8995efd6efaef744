"""``LLM.score``: the log-probabilities of given completions are the bits that sampling gives them."""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from engines import Letters, bigram, successor_table, table_llm
from tiers import in_tiers
from tiny import tiny_checkpoint

import jspec
from jspec import SamplingParams
from jspec.config.engine import LOGPROBS_MODES
from jspec.engine import scores
from jspec.llm import LLM

V, MAX_LEN = 97, 128
LLAMA, HYBRID = "LlamaForCausalLM", "Qwen3_5ForCausalLM"
DRAFTS = {"draft": "ngram", "num_draft_tokens": 3, "verify": "match", "draft_sampling": "coupled"}
PROMPTS = [np.random.default_rng(i).integers(3, V, size=n).tolist() for i, n in enumerate((1, 9, 70, 100))]
PROMPTS[1] = [5, 9, 2] * 3  # drafts are found in it
RAW, PROCESSED = LOGPROBS_MODES
PARAMS = [
    SamplingParams(temperature=temperature, seed=seed, max_tokens=20, logprobs=0)
    for seed, temperature in enumerate((0.0, 1.0, 0.0, 1.0))
]
PROCESSING = [
    SamplingParams(temperature=0.7, top_k=20, seed=0, max_tokens=20, logprobs=0),
    SamplingParams(temperature=1.0, frequency_penalty=0.4, repetition_penalty=1.3, seed=1, max_tokens=20, logprobs=0),
    SamplingParams(temperature=1.3, min_tokens=9, stop_token_ids=[*range(10, 40)], seed=2, max_tokens=20, logprobs=0),
    SamplingParams(temperature=0.0, presence_penalty=1.0, max_tokens=20, logprobs=0),
]
KINDS = [(name, drafts, mode) for name in (LLAMA, HYBRID) for drafts in (False, True) for mode in (RAW, PROCESSED)]
QUICK = [(LLAMA, False, RAW), (LLAMA, True, PROCESSED), (HYBRID, False, PROCESSED), (HYBRID, True, RAW)]


@functools.cache
def loaded(folder: Path, drafts: bool | str, mode: str) -> LLM:
    """``drafts`` are looked up, or made by the target itself."""
    options = DRAFTS | ({} if drafts is True else {"draft": folder}) if drafts else {}
    return jspec.load(folder, max_batch=4, max_len=MAX_LEN, page_size=16, logprobs_mode=mode, **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Iterator[dict[str, Path]]:
    path = tmp_path_factory.mktemp("targets")
    yield {name: tiny_checkpoint(path / name, name) for name in (LLAMA, HYBRID)}
    loaded.cache_clear()


def sampled(llm: LLM, params: list[SamplingParams]) -> tuple[list[list[int]], list[list[float]]]:
    """The completions of all prompts, and the log-probabilities that they were sampled with."""
    results = llm.generate(PROMPTS, params)
    numbers = [
        [each[token].logprob for each, token in zip(one.logprobs, one.token_ids, strict=True)] for one in results
    ]
    return [one.token_ids for one in results], numbers


def differing(found: list[np.ndarray], expected: list[list[float]]) -> int:
    """How many numbers have other bits."""
    assert [each.dtype for each in found] == [np.float32] * len(expected)
    return sum(
        int((one.view(np.uint32) != np.array(other, np.float32).view(np.uint32)).sum())
        for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("kind", in_tiers(KINDS, QUICK))
def test_scores_are_the_bits_of_sampling(folders, kind):
    name, drafts, mode = kind
    llm, params = loaded(folders[name], drafts, mode), PARAMS if mode == RAW else PROCESSING
    texts, expected = sampled(llm, params)
    assert {len(PROMPTS[i]) > 64 for i in range(4)} == {True, False}
    before = llm.engine.metrics().num_rounds
    assert differing(llm.score(PROMPTS, texts, sampling_params=params), expected) == 0
    a_round = MAX_LEN if (name, mode) == (LLAMA, RAW) else 1 + 3 * drafts  # tokens
    assert llm.engine.metrics().num_rounds - before == sum(-(-len(text) // a_round) for text in texts)
    alone = [llm.score([PROMPTS[i]], [texts[i]], sampling_params=params[i])[0] for i in (3, 1)]
    assert differing(alone, [expected[i] for i in (3, 1)]) == 0


@pytest.mark.parametrize("kind", [(LLAMA, False, RAW), (HYBRID, True, RAW)])
def test_scores_are_those_of_a_forward_pass(folders, kind):
    """Also of texts that nobody has sampled, through stop tokens, up to the last position, and of none."""
    llm, rng = loaded(folders[kind[0]], *kind[1:]), np.random.default_rng(9)
    texts = [rng.integers(V, size=n).tolist() for n in (30, 0, 7, MAX_LEN - len(PROMPTS[3]))]
    texts[0][4:6] = [2, 2]
    found = llm.score(PROMPTS, texts)
    assert list(map(len, found)) == list(map(len, texts))
    for prompt, text, one in zip(PROMPTS, texts, found, strict=True):
        behind = jax.nn.log_softmax(llm.logits([*prompt, *text])[len(prompt) - 1 :])
        assert one == pytest.approx(np.asarray(behind)[np.arange(len(text)), text], abs=1e-5)


def test_processed_scores_are_of_the_distribution_that_tokens_are_drawn_from(folders):
    """A text may have tokens that are not in it."""
    llm, text, params = loaded(folders[HYBRID], False, PROCESSED), [7, 7, 8], SamplingParams(temperature=0.5, top_k=40)
    (found,) = llm.score(PROMPTS[1], text, sampling_params=params)
    logits = np.asarray(llm.logits([*PROMPTS[1], *text]))[len(PROMPTS[1]) - 1 : -1]
    kept = logits >= np.sort(logits)[:, [-40]]
    expected = jax.nn.log_softmax(np.where(kept, logits / 0.5, -np.inf))[np.arange(3), text]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.isinf(found).any()
    assert np.isfinite(found).any()


@pytest.mark.parametrize("drafts", [False, True, "the target"])
def test_requests_of_both_modes_share_rounds(folders, drafts):
    """Each has the bits that it has among requests of its own mode, and nothing is compiled for other modes."""
    llm, places = loaded(folders[LLAMA], drafts, RAW), range(len(PROMPTS))
    of_mode = {mode: [dataclasses.replace(one, logprobs_mode=mode) for one in PROCESSING] for mode in (RAW, PROCESSED)}
    expected = {mode: [one.token_logprobs for one in llm.generate(PROMPTS, params)] for mode, params in of_mode.items()}
    assert all((expected[RAW][i] != expected[PROCESSED][i]).any() for i in places)
    compiled = []
    for modes in ((PROCESSED, RAW, RAW, PROCESSED), (RAW, PROCESSED, PROCESSED, RAW)):
        params = [of_mode[mode][i] for i, mode in enumerate(modes)]
        numbers = [expected[mode][i] for i, mode in enumerate(modes)]
        results = llm.generate(PROMPTS, params)
        assert differing([one.token_logprobs for one in results], numbers) == 0
        assert differing(llm.score(PROMPTS, [one.token_ids for one in results], sampling_params=params), numbers) == 0
        compiled.append(llm.engine.num_compilations)
    assert compiled[0] == compiled[1]


def test_requests_without_a_mode_have_that_of_the_engine(folders):
    by_engine, by_request = (loaded(folders[LLAMA], True, mode) for mode in (PROCESSED, RAW))
    params = [dataclasses.replace(one, logprobs_mode=PROCESSED) for one in PROCESSING]
    texts, expected = sampled(by_engine, PROCESSING)
    assert differing([one.token_logprobs for one in by_request.generate(PROMPTS, params)], expected) == 0
    assert differing(by_request.score(PROMPTS, texts, sampling_params=params), expected) == 0
    raw = [dataclasses.replace(one, logprobs_mode=RAW) for one in PROCESSING]
    assert differing(by_engine.score(PROMPTS, texts, sampling_params=raw), by_request.score(PROMPTS, texts)) == 0


@pytest.mark.parametrize("name", [LLAMA, HYBRID])
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 20}, {"top_p": 0.8}])
def test_settings_by_name(folders, name, settings):
    llm = loaded(folders[name], True, RAW)
    results = llm.generate(PROMPTS, seed=3, logprobs=0, logprobs_mode=PROCESSED, max_tokens=12, **settings)
    texts, expected = [one.token_ids for one in results], [one.token_logprobs for one in results]
    found = llm.score(PROMPTS, texts, logprobs_mode=PROCESSED, **settings)
    assert differing(found, expected) == 0
    raw = llm.score(PROMPTS, texts, **settings)
    assert differing(raw, llm.score(PROMPTS, texts, temperature=1.0)) == 0
    assert any((one != other).any() for one, other in zip(found, raw, strict=True))


def test_settings_that_are_not_given_are_the_default_ones(folders, monkeypatch):
    llm, text = loaded(folders[LLAMA], False, RAW), [7, 7, 8]
    settings = {"temperature": 0.5, "min_p": 0.01, "logprobs_mode": PROCESSED}
    expected = llm.score(PROMPTS[1], text, **settings)
    monkeypatch.setattr(llm.engine.frontend, "default_params", SamplingParams(**settings | {"min_p": 0.9}))
    assert differing(llm.score(PROMPTS[1], text, min_p=0.01), expected) == 0
    assert differing(llm.score(PROMPTS[1], text), expected) > 0


def test_a_completion_that_is_read_as_a_prompt_is_detected(folders, monkeypatch):
    """The fault: recurrent states read it in chunks, and a round reads token by token."""
    llm = loaded(folders[HYBRID], True, RAW)
    texts, expected = sampled(llm, PARAMS)
    monkeypatch.setattr(scores, "_reads", lambda *_: True)
    found = llm.score(PROMPTS, texts)
    assert differing(found, expected) > 0
    assert np.concatenate(found) == pytest.approx(np.concatenate(expected), abs=1e-5)


def test_texts_and_targets_of_which_nothing_is_known():
    """Shapes are pinned for them, and rounds write the completions down."""
    llm = table_llm(bigram(successor_table() / 4), tokenizer=Letters())
    assert llm.engine.config.pins_shapes
    results = llm.generate(["abc", "x"], seed=3, max_tokens=6, logprobs=0)
    expected = [[each[token].logprob for each, token in zip(r.logprobs, r.token_ids, strict=True)] for r in results]
    assert differing(llm.score(["abc", [23]], [r.token_ids for r in results]), expected) == 0
    (ids,), (text,) = llm.score([0, 1, 2], [3, 4]), llm.score("abc", "de")
    assert ids.tolist() == text.tolist()
    kept = llm.score("xyabc", "de", sampling_params=SamplingParams(truncate_prompt_tokens=1))
    assert kept[0].tolist() == llm.score("c", "de")[0].tolist()
    settings = {"temperature": 0.7, "top_k": 5, "logprobs_mode": PROCESSED}
    result = llm.generate("abc", seed=3, max_tokens=6, logprobs=0, **settings)
    assert llm.score("abc", result.token_ids, **settings)[0] == pytest.approx(result.token_logprobs, abs=1e-5)


NO_FORM = {"structured_outputs": {"choice": ["a"]}}


@pytest.mark.parametrize(
    ("prompts", "completions", "options", "said"),
    [
        ([[5]], [[1], [2]], {}, "completions has 2 entries: expected one for each prompt, 1"),
        ([[5]], {1}, {}, "completions is a set, which has no order"),
        ([[5]], [[1, V]], {}, "completion 0 has token id 97: expected 0..96, the target's vocabulary"),
        ([[5], [-1]], [[1], [1]], {}, "prompt 1 has token id -1: expected 0..96"),
        ([[5]], [[1.5]], {}, "completion 0: expected a string or a flat list of integer token ids"),
        ([[5]], ["a"], {}, "completion 0 is text, but the checkpoint has no tokenizer; pass token ids"),
        (
            [[5] * 100],
            [[1] * 29],
            {},
            "completion 0 has 29 tokens behind a prompt of 100: expected at most 28, as max_len=128 counts both; load with",
        ),
        ([[5]], [[1]], NO_FORM, "completion 0: structured_outputs=.*: expected None"),
    ],
)
def test_what_cannot_be_scored_is_said_before_anything_runs(folders, prompts, completions, options, said, monkeypatch):
    llm = loaded(folders[HYBRID], False, PROCESSED)
    monkeypatch.setattr(llm.engine, "run", None)
    with pytest.raises(ValueError, match=said):
        llm.score(prompts, completions, sampling_params=SamplingParams(**options))


def test_a_token_that_is_taken_out_is_named(folders):
    llm, params = loaded(folders[HYBRID], False, PROCESSED), SamplingParams(allowed_token_ids=[3, 4])
    with pytest.raises(ValueError, match="completion 0 has token 5 at place 1: expected one that may come there"):
        llm.score([[5]], [[3, 5, 4]], sampling_params=params)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (
            {"logprobs_mode": "raw"},
            ValueError,
            "logprobs_mode='raw': expected None or one of 'raw_logprobs', 'processed_",
        ),
        ({"temprature": 1.0}, TypeError, r"score\(\) has no argument 'temprature'; did you mean 'temperature'"),
        (
            {"sampling_params": SamplingParams(), "top_k": 3},
            TypeError,
            "top_k: give either params or its fields, not both",
        ),
        ({"logprobs_mode": PROCESSED, **NO_FORM}, ValueError, "completion 0: structured_outputs=.*: expected None"),
    ],
)
def test_settings_that_are_refused(folders, options, error, said, monkeypatch):
    llm = loaded(folders[LLAMA], False, RAW)
    monkeypatch.setattr(llm.engine, "run", None)
    with pytest.raises(error, match=said):
        llm.score([[5]], [[1]], **options)
