"""SamplingParams: refusals, synonyms, and the tokens that end a request."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jspec._foreign_names import FOREIGN_NAMES
from jspec.config import MAX_POSITIONS, EngineConfig, Speculation
from jspec.sampling.params import SamplingParams
from jspec.sampling.request_keys import request_keys

NAN, INF = math.nan, math.inf
BAD = {
    "temperature": [-0.1, NAN, INF, "1", None, True, 1e39, 10**400],
    "top_k": [-2, 1.5, "3", None, True, 2**31],
    "top_p": [0, -0.1, 1.1, NAN, "1", None, True, 1e-50],
    "min_p": [-0.1, 1.1, NAN, "0", None, True],
    "seed": [-(2**63) - 1, 2**63, 1.5, "7", True],
    "max_tokens": [0, -1, 1.5, "3", True],
    "min_tokens": [-1, 17, 1.5, "3", None, True, 2**31],
    "stop": [[""], ["a", 1], "", b"a", {"a": 1}],
    "stop_token_ids": [[-1], [1.5], ["a"], [True], [2**31], {1: 2}, 1],
    "ignore_eos": [1, 0, None, "yes"],
    "repetition_penalty": [0, -1, NAN, "1", None, True, 1e-31],
    "frequency_penalty": [-2.1, 2.1, NAN, "1", None, True],
    "presence_penalty": [-2.1, 2.1, NAN, "1", None, True],
    "logit_bias": [[1], 3],
    "allowed_token_ids": [[-1], [1.5], ["a"], [True], [2**31], {1: 2}, 1],
    "bad_words": [[" "], ["a", 1], "", b"a", {"a": 1}],
    "n": [0, -1, 1.5, "3", None, True, 1025],
    "logprobs": [-1, 21, 1.5, "3", True],
    "prompt_logprobs": [-1, 21, 1.5, "3", True],
    "logprobs_mode": ["raw", "", 1, True],
    "detokenize": [1, 0, None, "yes"],
    "skip_special_tokens": [1, 0, None, "yes"],
    "include_stop_str_in_output": [1, 0, None, "yes"],
    "truncate_prompt_tokens": [0, -2, 1.5, "3", True, 2**31],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_invalid_values_are_refused(name, value):
    with pytest.raises(ValueError, match=f"^{name}=.*: expected") as error:
        SamplingParams(**{name: value})
    shown = value[-1] if isinstance(value, list) else value[0] if isinstance(value, bytes) else value
    assert repr(shown)[:180] in str(error.value)


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        ({"3": 1.0}, "logit_bias='3': expected token ids"),
        ({-1: 1.0}, "logit_bias=-1: expected token ids"),
        ({3: 100.5}, r"logit_bias\[3\]=100.5: expected a number in -100..100"),
        ({3: NAN}, r"logit_bias\[3\]=nan: expected a number"),
    ],
)
def test_invalid_logit_bias_is_refused(bias, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        SamplingParams(logit_bias=bias)


@pytest.mark.parametrize("name", ["start", "end"])
def test_markers_that_are_no_text_are_refused(name):
    with pytest.raises(ValueError, match=rf"{name} has '\\udc80' at character 1, half of a surrogate pair"):
        SamplingParams(thinking_budget={"tokens": 3, name: "<\udc80>"})


def test_empty_allowed_token_ids_is_refused():
    with pytest.raises(ValueError, match=r"allowed_token_ids=.*: expected at least one token, or None for all"):
        SamplingParams(allowed_token_ids=[])


def test_stop_strings_need_text():
    with pytest.raises(ValueError, match=r"stop=.*: expected no stop strings with detokenize=False"):
        SamplingParams(stop="a", detokenize=False)


def test_processes_logits():
    assert not SamplingParams(temperature=2, top_k=3, logit_bias={}, bad_words=[], logprobs=3).processes_logits
    for name, value in {
        "repetition_penalty": 1.1,
        "frequency_penalty": -0.1,
        "presence_penalty": 0.1,
        "logit_bias": {0: 0.5},
        "allowed_token_ids": [0],
        "bad_words": "a",
    }.items():
        assert SamplingParams(**{name: value}).processes_logits


def test_copies_have_seeds_of_their_own():
    assert [copy.seed for copy in SamplingParams(n=3, seed=2**63 - 2).copies()] == [2**63 - 2, 2**63 - 1, 0]
    assert [copy.seed for copy in SamplingParams(n=4, seed=-3).copies()] == [-3, -2, -1, 0]
    assert [copy.seed for copy in SamplingParams(n=2, seed=-1).copies()] == [None, None]
    assert [(copy.n, copy.seed) for copy in SamplingParams(n=2).copies()] == [(1, None)] * 2
    assert hash(SamplingParams(logit_bias={1: 2.0})) == hash(SamplingParams(logit_bias={1: 2.0}))


def test_negative_seeds_have_keys_of_their_own():
    seeds = (-2, 2, 2**63 - 2, -(2**63))
    keys = request_keys([SamplingParams(seed=seed) for seed in seeds], None)
    assert len({tuple(key.tolist()) for key in keys}) == len(seeds)


def test_values_beyond_the_devices_types_are_refused():
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
        *(("seed", seed) for seed in (0, 2**63 - 1, -2, -(2**63))),
        ("top_p", 1),
        ("min_p", 1),
        ("max_tokens", np.int64(1)),
        ("min_tokens", 16),
    ],
)
def test_valid_values_are_taken(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_max_new_tokens_is_an_alias():
    assert SamplingParams(max_new_tokens=9) == SamplingParams(max_tokens=9)
    with pytest.raises(TypeError, match="are the same argument; give one"):
        SamplingParams(max_tokens=9, max_new_tokens=9)
    with pytest.raises(TypeError, match="has no argument 'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=1.0)
    with pytest.raises(TypeError, match="known are allowed_token_ids, bad_words"):
        SamplingParams(zzz=1.0)


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


def test_most_tokens_is_limited_by_room():
    assert [SamplingParams(max_tokens=n).most_tokens(7) for n in (None, 3, 7, 8, 10**30)] == [7, 3, 7, 7, 7]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sampling_params", "it is params"),
        ("stop_strings", "it is stop"),
        ("max_length", "in transformers it counts the prompt too; max_tokens counts new tokens only"),
        ("do_sample", "0 is greedy"),
        ("num_beams", "no beam search"),
        ("no_repeat_ngram_size", "repetition_penalty"),
        ("best_of", "it is n"),
        ("output_scores", "it is logprobs"),
    ],
)
def test_foreign_names_are_explained(name, words):
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


def test_stop_tokens_include_eos_unless_ignored():
    assert SamplingParams().stop_tokens((2, 5)) == (2, 5)
    assert SamplingParams(stop_token_ids=[7, 2]).stop_tokens((2, 5)) == (2, 5, 7)
    assert SamplingParams(stop_token_ids=[7, 2], ignore_eos=True).stop_tokens((2, 5)) == (7, 2)


def test_params_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.5  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("field", ["stop", "stop_token_ids"])
def test_values_that_are_no_lists_are_refused_by_name(field):
    with pytest.raises(ValueError, match=f"{field}=5: expected a"):
        SamplingParams(**{field: 5})
