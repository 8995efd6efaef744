"""What rounded weights, activations and caches cost real models: KL(float32 || rounded) in nats a token.

Each bound is half as much again as was measured."""

import numpy as np
import pytest
from real_models import GEMMA, QWEN, SMOL, divergence, folder, reference

import jspec

# By options of jspec-convert and of jspec.load.
WEIGHTS = {
    (SMOL, "int8", "auto"): 6.4e-3,
    (SMOL, "int8", "int8"): 5.7e-2,
    (SMOL, "fp8", "fp8"): 6.0e-2,
    (SMOL, "int4", "auto"): 0.32,
    (QWEN, "int8", "auto"): 1.75e-3,
    (QWEN, "int8", "int8"): 2.1e-2,
    (QWEN, "fp8", "fp8"): 1.6e-2,
    (QWEN, "int4", "auto"): 8.0e-2,
    (GEMMA, "int8", "auto"): 8.9e-3,
}
CACHES = {
    (SMOL, "fp8_per_token_head"): 6.3e-3,
    (GEMMA, "fp8_per_token_head"): 7.1e-3,
    (QWEN, "fp8_per_token_head"): 1.1e-2,
}


def assert_writes(llm, prompts):
    results = llm.generate(prompts[:2], jspec.SamplingParams(temperature=0.0, max_tokens=24))
    assert all(result.finish_reason in ("stop", "length") and result.token_ids for result in results)


@pytest.mark.parametrize("case", WEIGHTS, ids="-".join)
def test_weights_and_activations(load, converted, case):
    name, weights, activations = case
    expected, out = reference(name), converted(name, "--quantize", weights)
    llm = load(out, activation_dtype=activations)
    found = divergence(expected.logits, [np.asarray(llm.logits(tokens)) for tokens in expected.passages])
    assert 0 < found <= WEIGHTS[case]
    assert_writes(llm, expected.prompts)


@pytest.mark.parametrize("case", CACHES, ids="-".join)
def test_caches(load, case):
    """Of a passage the log-probabilities of the likeliest tokens are known, and the others count as one. ``logits`` would
    read no cache."""
    name, cache = case
    expected, params = reference(name), jspec.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=20)
    llm = load(name, kv_cache_dtype=cache)
    sums = []
    for tokens, logits in zip(expected.passages, expected.logits, strict=True):
        entries = llm.generate(tokens, params).prompt_logprobs[1:]
        sums += [coarse_divergence(row, entry) for row, entry in zip(logits[:-1], entries, strict=True)]
    assert 1e-8 < np.mean(sums) <= CACHES[case]
    assert_writes(llm, expected.prompts)


def coarse_divergence(row: np.ndarray, entry) -> float:
    """KL(row || entry) with the tokens that ``entry`` leaves out as one."""
    p = np.exp(row.astype(np.float64) - row.max())
    p = p[[*entry]] / p.sum()
    q = np.exp([found.logprob for found in entry.values()])
    p, q = (np.append(part, max(1 - part.sum(), 1e-12)) for part in (p, q))
    return float((p * np.log(p / q)).sum())


def test_the_weights_of_a_folder_are_read_as_they_are(load):
    """What the bounds above stand beside: nothing is rounded twice."""
    expected = reference(SMOL)
    found = [np.asarray(load(folder(SMOL)).logits(tokens)) for tokens in expected.passages]
    assert abs(divergence(expected.logits, found)) < 1e-9
