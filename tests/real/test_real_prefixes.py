"""A long prompt of which the prefix cache has most: the same text as without the cache."""

from pathlib import Path

import numpy as np
import pytest
from real_models import QWEN, reference_tokenizer

import jspec

LENGTH, END, MAX_LEN = 4000, 24, 4096
SOURCES = Path(__file__).parents[2] / "jspec" / "engine"
QUESTIONS = "\n\n# What is the first class of this file called?\n# It is", "\n\n# A summary in one line:\n#"


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """The same 4,000 tokens of source code, with two endings."""
    tokenizer = reference_tokenizer(QWEN)
    code = "\n".join(path.read_text("utf-8") for path in sorted(SOURCES.glob("*.py")))
    shared = tokenizer.encode(code)[:LENGTH]
    assert len(shared) == LENGTH
    return [[*shared, *tokenizer.encode(question)] for question in QUESTIONS]


def test_the_second_prompt_finds_the_first(load, prompts):
    params = jspec.SamplingParams(temperature=0.0, max_tokens=END, logprobs=0)
    how = {"max_len": MAX_LEN, "max_batch": 1}
    first, second = (load(QWEN, **how).generate(prompt, params) for prompt in prompts)
    assert (first.num_cached_tokens, second.num_cached_tokens >= 0.98 * LENGTH) == (0, True)
    alone = load(QWEN, prefix_cache=False, **how).generate(prompts[1], params)
    assert alone.num_cached_tokens == 0
    assert second.token_ids == alone.token_ids != first.token_ids
    np.testing.assert_allclose(second.token_logprobs, alone.token_logprobs, rtol=0, atol=1e-4)
