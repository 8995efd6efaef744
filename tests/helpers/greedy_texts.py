"""Greedy texts that drafts have sped up, which have to be the target's own."""

from collections.abc import Sequence

import numpy as np

import jspec
from jspec.llm import LLM


def drafted(llm: LLM, prompts: Sequence[Sequence[int]], most: int, each: bool = True) -> list[jspec.Result]:
    """The greedy results of prompts of tokens, after a check that every token is the likeliest of the target's own logits.

    Args:
      most: tokens of each.
      each: whether every one of them had drafts, or one of them at least.
    """
    results = jspec.generate(llm, list(map(list, prompts)), temperature=0, max_tokens=most, ignore_eos=True)
    for prompt, result in zip(prompts, results, strict=True):
        assert_likeliest(llm, prompt, result.token_ids)
    assert (all if each else any)(result.stats.num_draft_tokens for result in results)
    return results


def assert_likeliest(llm: LLM, prompt: Sequence[int], tokens: Sequence[int]):
    likeliest = np.argmax(llm.logits([*prompt, *tokens]), axis=-1).tolist()
    assert likeliest[len(prompt) - 1 : -1] == list(tokens)
