"""A prompt of 8,000 tokens of which the prefix cache has most: the same text as without the cache, and as transformers'."""

from pathlib import Path

import numpy as np
import pytest
from real_models import SMOL, log_softmax, read, reference_model, reference_tokenizer

import jspec

LENGTH, END, MAX_LEN = 8000, 24, 8192  # SmolLM2 has 8,192 positions
SOURCES = Path(__file__).parents[2] / "jspec" / "engine"
QUESTIONS = "\n\n# What is the first class of this file called?\n# It is", "\n\n# A summary in one line:\n#"


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """The same tokens of source code, with two endings."""
    tokenizer = reference_tokenizer(SMOL)
    code = "\n".join(path.read_text("utf-8") for path in sorted(SOURCES.glob("*.py")))
    shared = tokenizer.encode(code)[:LENGTH]
    assert len(shared) == LENGTH
    return [[*shared, *tokenizer.encode(question)] for question in QUESTIONS]


def test_the_second_prompt_finds_the_first(load, prompts):
    params = jspec.SamplingParams(temperature=0.0, max_tokens=END, logprobs=0)
    how = {"max_len": MAX_LEN, "max_batch": 1}
    first, second = (load(SMOL, **how).generate(prompt, params) for prompt in prompts)
    assert (first.num_cached_tokens, second.num_cached_tokens >= 0.98 * LENGTH) == (0, True)
    faster = {"prefix_cache": False, "prefill_chunk": 1024}  # than chunks of 32, on a CPU
    alone = load(SMOL, **faster, **how).generate(prompts[1], params)
    assert alone.num_cached_tokens == 0
    assert second.token_ids == alone.token_ids != first.token_ids
    np.testing.assert_allclose(second.token_logprobs, alone.token_logprobs, rtol=0, atol=1e-4)
    load.clear()
    model, text = reference_model(SMOL, attention="sdpa"), second.token_ids
    theirs = read(model, [*prompts[1], *text], last=len(text) + 1)[:-1]
    assert text == theirs.argmax(-1).tolist()
    np.testing.assert_allclose(second.token_logprobs, log_softmax(theirs).max(-1), rtol=0, atol=1e-4)
