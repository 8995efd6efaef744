"""``jspec doctor`` says what rounding costs in acceptance: of a drafter's weights, and of the target's cache."""

import numpy as np
import pytest
import tiny_heads
from mtp_checkpoints import with_layers
from tiny import tiny_checkpoint

from convert import convert
from jspec.cli import main
from jspec.commands.demo import FAMILY
from jspec.doctor import RoundingCost, diagnose
from jspec.outputs import Stats

PROMPTS = [[3, 4, 5], [7, 8], list(range(20, 45))]
SHORT = {"prompts": PROMPTS, "max_tokens": 8, "num_draft_tokens": 2}


def stats(*accepted: int) -> Stats:
    return Stats.of(4, [4] * len(accepted), list(accepted))


def test_the_uncertainty_is_that_of_the_difference():
    """By hand: the difference without each prompt in turn, and the jackknife's factor n - 1."""
    rounded, whole = (stats(1, 2), stats(0, 0, 3), stats(4)), (stats(2, 2), stats(0, 1, 3), stats(3))
    cost = RoundingCost("weights", rounded, whole)
    assert cost.lengths == (1 + 10 / 6, 1 + 11 / 6)
    without = [7 / 4 - 7 / 4, 7 / 3 - 7 / 3, 6 / 5 - 8 / 5]
    error = np.sqrt(2 / 3 * sum((one - np.mean(without)) ** 2 for one in without))
    assert cost.error == pytest.approx(error)
    assert str(cost) == (
        "weights: an acceptance length of 2.67 instead of 2.83, a difference of -0.17 (standard error 0.27, 3 prompts)"
    )
    same = RoundingCost("weights", whole, whole)
    assert (same.difference, same.error) == (0, 0)
    assert "standard error unknown from one prompt, 1 prompts" in str(RoundingCost("x", rounded[:1], whole[:1]))


def test_differences_between_prompts_are_no_uncertainty():
    """Prompts differ by far more than rounding costs."""
    rng = np.random.default_rng(0)
    whole = [stats(*rng.integers(2 * (i % 2), 2 * (i % 2) + 3, 40)) for i in range(20)]
    rounded = [
        stats(*(j * [0] + k * [1] + m * [2] + n * [3] + o * [4])) for one in whole for j, k, m, n, o in [moved(one)]
    ]
    cost = RoundingCost("weights", tuple(rounded), tuple(whole))
    assert cost.difference == pytest.approx(-1 / 40)
    assert cost.error == pytest.approx(0, abs=1e-12)


def moved(one: Stats) -> list[int]:
    """The histogram with one round that accepts a draft fewer."""
    counts = list(one.acceptance_histogram)
    largest = max(j for j, count in enumerate(counts) if count)
    counts[largest] -= 1
    counts[largest - 1] += 1
    return counts


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """A tiny target, a head for it, and what ``jspec-convert --quantize int4`` makes of the head."""
    folder = tmp_path_factory.mktemp("heads")
    tiny_checkpoint(folder / "target", num_hidden_layers=8)
    tiny_heads.mlp_speculator(folder / "head")
    convert(folder / "head", folder / "int4", quantize="int4")
    return folder


@pytest.mark.filterwarnings("ignore:.*holds no .* scales of keys and values:UserWarning")
def test_weights_and_cache_of_the_shipped_family(tmp_path):
    """A good head in four bits, and a cache in eight: both lengths, measured with the engine."""
    int4 = convert(FAMILY / "eagle", tmp_path / "int4", quantize="int4").out
    given = {"draft_reference": FAMILY / "eagle", "kv_cache_dtype": "fp8"}
    found = diagnose(FAMILY / "target", int4, max_tokens=32, **given)
    weights, cache = found.rounding
    assert (weights.what, cache.what) == ("weights of the draft in int4", "cache of the target in fp8")
    assert found.served is not None
    assert weights.lengths[0] == cache.lengths[0] == found.served.mean_acceptance_length
    assert min(*weights.lengths, *cache.lengths) > 1.8
    assert weights.rounded != weights.whole
    assert cache.rounded != cache.whole
    original = diagnose(FAMILY / "target", FAMILY / "eagle", max_tokens=32, kv_cache_dtype="fp8")
    assert original.served is not None
    assert original.served.mean_acceptance_length == weights.lengths[1]
    plain = diagnose(FAMILY / "target", int4, max_tokens=32)
    assert plain.served is not None
    assert plain.served.mean_acceptance_length == cache.lengths[1]
    assert plain.rounding == ()


def test_the_command_prints_it(heads, capsys):
    command = ["doctor", "--target", str(FAMILY / "target"), "--draft", str(FAMILY / "mlp"), "--max-tokens", "12"]
    assert main([*command, "--kv-cache-dtype", "fp8_per_token_head"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "rounding: cache of the target in fp8_per_token_head: an acceptance length of" in out
    assert "standard error" in out
    assert main(["doctor", "--target", str(heads / "target"), "--reference", "x", "--draft-reference", "y"]) == 2
    assert "draft_reference='y': expected --draft beside it" in capsys.readouterr().err


def test_multi_token_prediction_layers(tmp_path):
    """Those of the quantised folder beside those of the original: the text is that of the target that is given."""
    src = with_layers(tmp_path / "src")
    out = convert(src, tmp_path / "out", quantize="int8").out
    [cost] = diagnose(out, "mtp", draft_reference=src, **SHORT).rounding
    assert cost.what == "weights of the draft in int8"
    assert len(cost.rounded) == len(cost.whole) == len(PROMPTS)


def test_other_drafts_are_no_originals(heads, tmp_path):
    """Before anything is measured."""
    given = {"target": heads / "target", **SHORT}
    with pytest.raises(ValueError, match=r"draft_reference=.*int4': its weights are int4: expected the original"):
        diagnose(draft=heads / "head", draft_reference=heads / "int4", **given)
    other = tiny_heads.eagle3(tmp_path / "other")
    with pytest.raises(ValueError, match=r"draft_reference=.*other': expected the draft that .*int4' was made from"):
        diagnose(draft=heads / "int4", draft_reference=other, **given)
    with pytest.raises(ValueError, match=r"kv_cache_dtype='int8': expected one of"):
        diagnose(draft=heads / "head", kv_cache_dtype="int8", **given)
