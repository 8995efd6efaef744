"""SamplingParams: what is refused, what means the same, and which tokens end a request."""

import dataclasses
import math

import numpy as np
import pytest

from jspec.sampling.params import SamplingParams

NAN, INF = math.nan, math.inf
BAD = {
    "temperature": [-0.1, NAN, INF, "1", None, True],
    "top_k": [-2, 1.5, "3", None, True],
    "top_p": [0, -0.1, 1.1, NAN, "1", None, True],
    "min_p": [-0.1, 1.1, NAN, "0", None, True],
    "seed": [-1, 2**63, 1.5, "7", True],
    "max_tokens": [0, -1, 1.5, "3", None, True],
    "min_tokens": [-1, 17, 1.5, "3", None, True],
    "stop": [[""], ["a", 1], ""],
    "stop_token_ids": [[-1], [1.5], ["a"], [True]],
    "ignore_eos": [1, 0, None, "yes"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_refused(name, value):
    with pytest.raises(ValueError, match=f"^{name}=.*: expected") as error:
        SamplingParams(**{name: value})
    shown = value[-1] if isinstance(value, list) else value
    assert repr(shown) in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", t) for t in (0, np.float32(0.5))),
        *(("top_k", k) for k in (-1, 0, np.int32(3))),
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
