"""Drafters give the same tokens with unrolled passes, as on a GPU, and with a loop, as in most tests."""

import pytest
from engines import decode, engine, ragged_prompts, tokens_of
from heads import head_engine

from jspec.drafting import drawing
from jspec.sampling.params import SamplingParams

K, PROMPTS = 4, ragged_prompts()
PARAMS = [SamplingParams(temperature=0.8 * (i % 2), max_tokens=12, repetition_penalty=1.2) for i in range(len(PROMPTS))]
MAKE = {
    "draft_model": lambda: engine.__wrapped__("draft_model", K),
    "eagle": lambda: head_engine.__wrapped__("eagle", K),
    "mtp": lambda: head_engine.__wrapped__("mtp", K),
}


@pytest.mark.parametrize("drafter", MAKE)
def test_unrolled_and_looped_passes_give_the_same_tokens(drafter, monkeypatch):
    draws = []
    draw = drawing.Drawing.draw
    monkeypatch.setattr(drawing.Drawing, "draw", lambda *args: draws.append(None) or draw(*args))

    def run(unrolled_passes: int):
        """The tokens, how many drafts were accepted, and how many draws were traced."""
        monkeypatch.setattr(drawing, "UNROLLED_PASSES", unrolled_passes)
        draws.clear()
        ended = decode(MAKE[drafter](), PROMPTS, PARAMS)
        return tokens_of(ended), sum(sum(active.accepted) for active in ended), len(draws)

    unrolled, looped = run(8), run(1)
    assert unrolled[:2] == looped[:2]
    assert unrolled[1] > 0
    assert looped[2] < unrolled[2]
