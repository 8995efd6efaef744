"""A round of a drafter with a draft vocabulary as XLA compiles it for an H200: its drafts stay within that vocabulary."""

import dataclasses
import functools
import re
from typing import Any

import pytest
from deviceless import compiled_round, why_not

from benchmarks.random_modules import abstract_module
from benchmarks.rounds.hlo import Op, launched
from benchmarks.rounds.programs import Decoding
from benchmarks.shapes import LLAMA_1B, LLAMA_8B, head_for

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

K, LAYERS, V, Vd = 2, 3, LLAMA_8B.vocab_size, 32_768
TARGET = dataclasses.replace(LLAMA_8B, num_layers=LAYERS, windows=())
DSPARK: Any = head_for(LLAMA_8B, "dspark")
DRAFTERS = {
    "draft_model": dataclasses.replace(LLAMA_1B, num_layers=1, windows=()),
    "eagle": head_for(TARGET, "eagle"),
    "mlp": dataclasses.replace(head_for(TARGET, "mlp"), num_stages=K),
    "medusa": head_for(TARGET, "medusa"),
    "dspark": dataclasses.replace(
        DSPARK,
        layers=dataclasses.replace(DSPARK.layers, num_layers=1, windows=()),
        aux_layers=(0, 1, 2),
        causal=(False,),
    ),
}


@functools.cache
def round_of(method: str, batch: int, size: int | None = Vd) -> list[Op]:
    """What a round launches with a draft vocabulary of so many tokens, None for all."""
    draft = DRAFTERS[method] if size is None else DRAFTERS[method].with_draft_vocabulary(size)
    what = Decoding(method, K, batch, start=512, new=256)
    step, _ = compiled_round(what, abstract_module(TARGET), abstract_module(draft, drafts=True), draft)
    return launched(step.as_text(), loop=True)


def over_tokens(ops: list[Op]) -> list[str]:
    """The launches that make an array with an axis of all tokens, by name."""
    return [op.name for op in ops if re.search(rf"[\[,]{V}[\],]", op.result)]


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("method", DRAFTERS)
def test_nothing_but_the_targets_logits_is_over_all_tokens(method, batch):
    """The product that makes them, and the early stops that are taken out of them."""
    assert len(over_tokens(round_of(method, batch))) == 2


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_a_draft_vocabulary_launches_hardly_more(method):
    """One launch puts the tokens of all drafts together."""
    assert 0 < len(round_of(method, 16)) <= len(round_of(method, 16, None)) + 1


def test_the_check_detects_logits_over_all_tokens():
    assert len(over_tokens(round_of("eagle", 16, None))) > 2
