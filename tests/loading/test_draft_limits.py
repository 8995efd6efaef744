"""Drafting past the positions that a drafter's checkpoint states: heads go on, and what stops says so."""

import dataclasses
import warnings

import pytest
import tiny_heads
from engines import DRAFT, TARGET, bigram, successor_table, table_llm
from heads import HEADS, LAYER
from resaved import set_keys
from tiny import tiny_checkpoint

import jspec
from jspec.config import Rope
from jspec.config.heads import Eagle3Config, EagleConfig, PardConfig
from jspec.drafting.methods import drafter_for
from jspec.loading.compatibility import with_positions
from jspec.outputs import Stats

LONG = dataclasses.replace(TARGET, max_position=1000)
YARN = {"kind": "yarn", "factor": 4.0, "original_max_position": 100}


def head(max_position: int, **rope) -> EagleConfig:
    return EagleConfig(dataclasses.replace(LAYER, max_position=max_position, rope=Rope(**rope)))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (head(100), 1000),
        (head(100, kind="linear", factor=2.0), 1000),
        (head(100, kind="llama3", factor=8.0), 1000),
        (head(2000), 2000),
        (head(100, **YARN), 400),
        (head(500, **YARN), 500),
        (head(100, **{**YARN, "factor": 40.0}), 1000),
        (head(100, kind="dynamic", factor=4.0), 100),
        (Eagle3Config(dataclasses.replace(LAYER, max_position=100), 20, TARGET.hidden_size), 1000),
    ],
)
def test_a_head_gets_the_positions_of_its_target(config, expected):
    assert with_positions(LONG, config, max_len=expected if expected < 1000 else 1000).layers.max_position == expected


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (head(100, kind="dynamic", factor=4.0), "eagle"),
        (head(100, **{**YARN, "factor": 1.0}), "eagle"),
        (dataclasses.replace(DRAFT, max_position=100), "draft_model"),
        (PardConfig(dataclasses.replace(DRAFT, max_position=100), 5), "parallel"),
    ],
)
def test_a_position_limit_warns_with_both_numbers(config, name):
    with pytest.warns(
        UserWarning, match=f"the {name} checkpoint has 100 positions, and max_len=101: nothing is drafted"
    ):
        assert with_positions(LONG, config, max_len=101) == config
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert with_positions(LONG, config, max_len=100) == config


@pytest.mark.parametrize("kind", ["draft_model", "parallel", "eagle"])
def test_longrope_factors_follow_max_len(kind):
    half = LAYER.head_dim // 2
    longrope = {
        "kind": "longrope",
        "original_max_position": 50,
        "short_factors": (1.0,) * half,
        "long_factors": (2.0,) * half,
    }
    layers = dataclasses.replace(LAYER, max_position=1000, rope=Rope(**longrope))
    draft = {"draft_model": layers, "parallel": PardConfig(layers, 5), "eagle": EagleConfig(layers)}[kind]
    for max_len, long_texts in ((50, False), (51, True)):
        assert with_positions(LONG, draft, max_len).decoder.rope.long_texts == long_texts


def test_drafters_without_positions_have_no_limit():
    for name in ("mlp", "medusa"):
        assert with_positions(LONG, HEADS[name], max_len=1000) == HEADS[name]
    assert drafter_for("ngram", TARGET, jspec.Speculation())(None, None).longest_text is None


def test_steps_past_the_limit_are_counted():
    """Lengths before the steps are 5, 9, 10 and 13."""
    stats = Stats.of(4, drafted=[4, 1, 0, 0], accepted=[3, 0, 2, 0], prompt_length=5, longest_text=9)
    assert stats.num_steps_past_draft_limit == 2
    assert (stats + stats).num_steps_past_draft_limit == 4
    assert Stats.of(4, drafted=[4, 1], accepted=[3, 0], prompt_length=5).num_steps_past_draft_limit == 0


def test_a_draft_model_past_its_limit_warns_once():
    """It has twenty positions and every draft is accepted, so the text grows to 8, 13, 18 and, by three drafts, 22 tokens;
    from there on one token a round."""
    llm = table_llm(bigram(successor_table()), bigram(successor_table(), max_position=20), K=4)
    params = jspec.SamplingParams(temperature=0, max_tokens=30)
    words = r"the draft_model drafter has no positions for texts of more than 20 tokens: 11 of 15 rounds of prompt 0"
    with pytest.warns(UserWarning, match=words) as caught:
        first = jspec.generate(llm, [1, 2, 3], params)
    assert len(caught) == 1
    again = jspec.generate(llm, [1, 2, 3], params)  # a second warning would be an error
    for result in (first, again):
        steps, past = result.stats.num_steps, result.stats.num_steps_past_draft_limit
        assert (steps, past) == (15, 11)
        assert result.stats.drafted_per_position[0] == steps - past


def test_a_head_drafts_past_what_its_checkpoint_says(tmp_path):
    target = tiny_checkpoint(tmp_path / "target", num_hidden_layers=8)
    folder = tiny_heads.eagle3(tmp_path / "head", max_position_embeddings=16)
    sizes = {"max_batch": 1, "max_len": 64, "page_size": 16, "prefill_chunk": 16}
    settings = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    llm = jspec.load(target, folder, speculation=jspec.Speculation(2), **sizes)
    assert llm.engine.runner.longest_text == 257
    result = jspec.generate(llm, list(range(20, 40)), **settings)
    assert result.stats.num_steps_past_draft_limit == 0
    assert result.stats.drafted_per_position[0] >= result.stats.num_steps - 1

    set_keys(folder, rope_scaling={"type": "dynamic", "factor": 2.0})
    with pytest.warns(UserWarning, match="the eagle3 checkpoint has 16 positions, and max_len=64"):
        llm = jspec.load(target, folder, speculation=jspec.Speculation(2), **sizes)
    with pytest.warns(UserWarning, match="no positions for texts of more than 17 tokens"):
        stopped = jspec.generate(llm, list(range(20, 40)), **settings)
    assert stopped.token_ids == result.token_ids
    assert stopped.stats.num_draft_tokens == 0
    assert stopped.stats.num_steps_past_draft_limit == stopped.stats.num_steps == 30
