"""SamplingParams: what is refused, what means the same, and which tokens end a request."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jspec._foreign_names import FOREIGN_NAMES
from jspec.config import MAX_POSITIONS, EngineConfig, Speculation
from jspec.sampling.params import SamplingParams

NAN, INF = math.nan, math.inf
BAD = {
    "temperature": [-0.1, NAN, INF, "1", None, True, 1e39, 10**400],
    "top_k": [-2, 1.5, "3", None, True, 2**31],
    "top_p": [0, -0.1, 1.1, NAN, "1", None, True, 1e-50],
    "min_p": [-0.1, 1.1, NAN, "0", None, True],
    "seed": [-1, 2**63, 1.5, "7", True],
    "max_tokens": [0, -1, 1.5, "3", True],
    "min_tokens": [-1, 17, 1.5, "3", None, True, 2**31],
    "stop": [[""], ["a", 1], "", b"a", {"a": 1}],
    "stop_token_ids": [[-1], [1.5], ["a"], [True], [2**31], {1: 2}, 1],
    "ignore_eos": [1, 0, None, "yes"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_refused(name, value):
    with pytest.raises(ValueError, match=f"^{name}=.*: expected") as error:
        SamplingParams(**{name: value})
    shown = value[-1] if isinstance(value, list) else value[0] if isinstance(value, bytes) else value
    assert repr(shown) in str(error.value)


def test_what_a_device_cannot_hold_is_refused():
    """min_tokens also where max_tokens sets no smaller bound."""
    for most in (None, 2**40):
        assert SamplingParams(max_tokens=most, min_tokens=MAX_POSITIONS).min_tokens == MAX_POSITIONS
        with pytest.raises(ValueError, match=f"min_tokens={2**31}: expected an integer in 0..{MAX_POSITIONS}$"):
            SamplingParams(max_tokens=most, min_tokens=2**31)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", t) for t in (0, np.float32(0.5))),
        *(("top_k", k) for k in (-1, 0, np.int32(3), 2**31 - 1)),
        *(("max_tokens", n) for n in (None, 2**31, 10**400)),
        *(("seed", seed) for seed in (0, 2**63 - 1)),
        ("top_p", 1),
        ("min_p", 1),
        ("max_tokens", np.int64(1)),
        ("min_tokens", 16),
    ],
)
def test_taken(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_names():
    assert SamplingParams(max_new_tokens=9) == SamplingParams(max_tokens=9)
    with pytest.raises(TypeError, match="are the same argument; give one"):
        SamplingParams(max_tokens=9, max_new_tokens=9)
    with pytest.raises(TypeError, match="has no argument 'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=1.0)
    with pytest.raises(TypeError, match="known are ignore_eos, max_tokens"):
        SamplingParams(presence=1.0)


def test_one_stop_string_or_several():
    assert SamplingParams(stop="abc").stop == ("abc",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()
    assert SamplingParams(stop=(s for s in "ab")).stop == ("a", "b")


@pytest.mark.parametrize("ids", [[3, 5], (3, 5), np.array([3, 5]), jnp.array([3, 5]), range(3, 6, 2), iter([3, 5])])
def test_stop_tokens_in_any_list(ids):
    tokens = SamplingParams(stop_token_ids=ids).stop_token_ids
    assert tokens == (3, 5)
    assert all(type(token) is int for token in tokens)


def test_room_for_new_tokens():
    assert [SamplingParams(max_tokens=n).most_tokens(7) for n in (None, 3, 7, 8, 10**30)] == [7, 3, 7, 7, 7]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sampling_params", "it is params"),
        ("stop_strings", "it is stop"),
        ("max_length", "in transformers it counts the prompt too; max_tokens counts new tokens only"),
        ("do_sample", "0 is greedy"),
        ("num_beams", "no beam search"),
        ("repetition_penalty", "not supported yet"),
        ("n", "a prompt has one completion"),
        ("best_of", "a prompt has one completion"),
        ("logprobs", "not supported yet"),
    ],
)
def test_what_other_libraries_call_it(name, words):
    with pytest.raises(TypeError, match=f"SamplingParams has no argument '{name}': .*{words}"):
        SamplingParams(**{name: 1})


def test_no_foreign_name_is_one_of_ours():
    ours = {field.name for kind in (SamplingParams, Speculation, EngineConfig) for field in dataclasses.fields(kind)}
    ours |= {*SamplingParams.aliases, *Speculation.aliases, "target", "draft", "params", "prompts", "key"}
    assert not ours & FOREIGN_NAMES.keys()
    assert all(sentence[-1] not in ".;" for sentence in FOREIGN_NAMES.values())


def test_near_zero_is_greedy():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def test_tokens_that_end_a_request():
    assert SamplingParams().stop_tokens((2, 5)) == (2, 5)
    assert SamplingParams(stop_token_ids=[7, 2]).stop_tokens((2, 5)) == (2, 5, 7)
    assert SamplingParams(stop_token_ids=[7, 2], ignore_eos=True).stop_tokens((2, 5)) == (7, 2)


def test_they_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.5  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("field", ["stop", "stop_token_ids"])
def test_what_is_no_list_is_refused_by_name(field):
    with pytest.raises(ValueError, match=f"{field}=5: expected a"):
        SamplingParams(**{field: 5})
