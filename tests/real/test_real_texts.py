"""Logits, greedy texts and log-probabilities of real models are those of transformers."""

import numpy as np
import pytest
from real_models import (
    PASSAGES,
    QWEN,
    SMALL,
    TOKENS,
    divergence,
    log_softmax,
    prompts_of,
    read,
    reference,
    reference_model,
    written,
)

import jspec

of_each = pytest.mark.parametrize("name", SMALL, scope="module")


def logits_of(llm, passages) -> list[np.ndarray]:
    return [np.asarray(llm.logits(tokens)) for tokens in passages]


@of_each
def test_tokens_of_texts(load, name):
    expected, tokenizer = reference(name), load(name).tokenizer
    assert [tokenizer.encode(text) for text in PASSAGES] == expected.passages


@of_each
def test_logits(load, name):
    """At most 3e-6 of the largest were measured."""
    expected = reference(name)
    for one, other in zip(expected.logits, logits_of(load(name), expected.passages), strict=True):
        assert np.abs(one - other).max() <= 1e-4 * np.abs(one).max()


@of_each
def test_greedy_texts(load, name):
    expected = reference(name)
    results = load(name).generate(expected.prompts, jspec.SamplingParams(temperature=0.0, max_tokens=TOKENS))
    assert [result.token_ids for result in results] == expected.texts


@of_each
def test_scores_of_given_texts(load, name):
    expected, prompt = reference(name), 8
    texts = [tokens[prompt:] for tokens in expected.passages]
    found = load(name).score([tokens[:prompt] for tokens in expected.passages], texts)
    for scores, tokens, logits in zip(found, texts, expected.logits, strict=True):
        theirs = log_softmax(logits)[prompt - 1 : -1][np.arange(len(tokens)), tokens]
        np.testing.assert_allclose(scores, theirs, rtol=0, atol=1e-4)


@of_each
def test_log_probabilities_of_sampled_tokens(load, name):
    params = jspec.SamplingParams(temperature=1.0, seed=5, max_tokens=24, logprobs=5)
    results, model = load(name).generate(prompts_of(name)[:4], params), reference_model(name)
    for result in results:
        whole = read(model, [*result.prompt_token_ids, *result.token_ids])[len(result.prompt_token_ids) - 1 : -1]
        for token, entry, row in zip(result.token_ids, result.logprobs, log_softmax(whole), strict=True):
            assert next(iter(entry)) == token
            assert {*np.argsort(-row)[:5].tolist()} <= {*entry}
            for other, found in entry.items():
                assert found.logprob == pytest.approx(row[other], abs=1e-4)
                assert (
                    abs(found.rank - 1 - (row > row[other]).sum()) <= 1
                )  # two tokens may be as likely but for rounding


@of_each
def test_bfloat16_is_as_near_as_that_of_transformers(load, name):
    """Measured in nats a token, jspec's and transformers': 8.9e-4 and 1.05e-3, 7.1e-4 and 7.4e-4, 4.5e-4 and 7.4e-4."""
    expected = reference(name)
    found = divergence(expected.logits, logits_of(load(name, dtype="bfloat16"), expected.passages))
    assert 0 < found <= 1.1 * expected.kl_of_bfloat16


def test_defaults_of_a_folder(load):
    """Qwen's generation_config.json has a repetition penalty, which greedy texts follow, too."""
    prompts = prompts_of(QWEN)
    expected = written(reference_model(QWEN), prompts, TOKENS, repetition_penalty=1.1)
    assert expected != reference(QWEN).texts
    llm = load(QWEN, generation_config="auto")
    assert llm.default_sampling_params.repetition_penalty == 1.1
    results = llm.generate(prompts, temperature=0.0, max_tokens=TOKENS)
    assert [result.token_ids for result in results] == expected
