"""From fields of requests to SamplingParams, and from log-probabilities to OpenAI's formats."""

import dataclasses
import json
import math

import pytest
from tokenizer_families import FAMILIES

import jspec
from jspec.serving.generation.list_limits import most_entries
from jspec.serving.generation.protocol import ChatRequest, CompletionRequest, parsed
from jspec.serving.generation.sampling import num_choices, of_value_error, params_of
from jspec.serving.http.errors import ApiError, shown
from jspec.serving.http.limits import Limits
from jspec.serving.openai.logprobs import LEAST, TextOffsets, chat_logprobs, completion_logprobs, prompt_logprobs

MOST = most_entries(Limits(), vocab_size=100, max_len=100)
DEFAULTS = jspec.SamplingParams(temperature=0.3, top_k=9)
OTHERS = {
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {"7": 5.0},
    "allowed_token_ids": [1, 2],
    "bad_words": ["bad"],
    "logprobs": 0,
    "prompt_logprobs": 2,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "truncate_prompt_tokens": 4,
    "max_drafts": 2,
}


def completion(**fields) -> jspec.SamplingParams:
    return params_of(parsed(CompletionRequest, {"prompt": "a", **fields}, MOST), DEFAULTS, Limits())


def chat(**fields) -> jspec.SamplingParams:
    return params_of(parsed(ChatRequest, {"messages": [], **fields}, MOST), DEFAULTS, Limits())


def test_missing_fields_come_from_the_defaults():
    assert completion() == dataclasses.replace(DEFAULTS, max_tokens=16)
    assert chat() == dataclasses.replace(DEFAULTS, max_tokens=None)
    assert completion(temperature=None, max_tokens=None) == chat()


def test_given_fields_are_passed_on():
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "seed": 3, "min_tokens": 2}
    given |= {"stop": ["a", "b"], "stop_token_ids": [4], "ignore_eos": True, "max_tokens": 9}
    assert completion(**given) == jspec.SamplingParams(**given)
    assert chat(**given) == jspec.SamplingParams(**given)
    assert chat(max_completion_tokens=5, max_tokens=9).max_tokens == 5


@pytest.mark.parametrize(("name", "value"), OTHERS.items())
def test_a_field_is_passed_on(name, value):
    expected, found = {7: 5.0} if name == "logit_bias" else value, getattr(completion(**{name: value}), name)
    assert found == (tuple(expected) if isinstance(found, tuple) else expected)


def test_logprobs_of_a_chat_and_of_an_echo():
    def counts(found: jspec.SamplingParams) -> tuple:
        return found.logprobs, found.prompt_logprobs

    assert counts(chat()) == (None, None)
    assert counts(chat(logprobs=True)) == (0, None)
    assert counts(chat(logprobs=True, top_logprobs=3)) == (3, None)
    assert counts(completion(logprobs=2)) == (2, None)
    assert counts(completion(logprobs=2, echo=True)) == (2, 2)
    assert counts(completion(logprobs=2, echo=True, prompt_logprobs=4)) == (2, 4)
    assert counts(completion(logprobs=2, echo=True, stream=True)) == (2, 2)
    with pytest.raises(ApiError, match="stream=false"):
        completion(prompt_logprobs=2, stream=True)


@pytest.mark.parametrize(
    ("message", "param", "told"),
    [
        ("top_p=2: expected less", "top_p", "top_p=2: expected less"),
        ("logit_bias[7]=200: expected less", "logit_bias", "logit_bias[7]=200: expected less"),
        ("prompt 0: logit_bias has token 9: expected less", "logit_bias", "logit_bias has token 9: expected less"),
        ("prompt 0 has token id 9: expected less", "prompt", "prompt[3] has token id 9: expected less"),
        ("prompt 0 needs 9 pages, max_tokens=3", "prompt", "prompt[3] needs 9 pages, max_tokens=3"),
    ],
)
def test_errors_of_the_engine_name_a_field_of_the_request(message, param, told):
    error = of_value_error(ValueError(message), parsed(CompletionRequest, {"prompt": "a"}, MOST), "prompt[3]")
    assert (error.status, error.param, error.message) == (400, param, told)


def test_number_of_completions_is_checked():
    asked = parsed(CompletionRequest, {"prompt": "a", "n": 3}, MOST)
    assert num_choices(asked, 2, Limits(), None) == 6
    assert num_choices(asked, 2, Limits(), 6) == 6
    with pytest.raises(ApiError, match="2 prompts with n=3 are 6 completions: expected at most 5"):
        num_choices(asked, 2, Limits(), 5)


def test_limits_are_checked():
    with pytest.raises(ValueError, match="max_n=0: expected a number above 0"):
        Limits(max_n=0)


def test_long_values_are_shortened_in_errors():
    for value in ("a" * 10**6, [1] * 10**6, {str(i): i for i in range(10**5)}, "\ud800", b"\xff"):
        assert len(shown(value).encode()) <= 100


@dataclasses.dataclass(frozen=True)
class Logprob:
    """As ``jspec.outputs`` has it."""

    logprob: float
    rank: int
    decoded_token: str | None


PLACES = [
    {5: Logprob(-0.25, 1, "é"), 6: Logprob(-2.0, 2, "b"), 7: Logprob(-3.0, 3, "c")},
    {9: Logprob(-math.inf, 40, None), 6: Logprob(-0.5, 1, "b"), 7: Logprob(-0.75, 2, "b")},
]


def own_bytes(token, text):
    """The bytes of a token; of token 6 those of a part of a character."""
    return b"\xc3" if token == 6 else text.encode()


def test_logprobs_as_a_chat_has_them():
    found = chat_logprobs([5, 9], PLACES, 2, own_bytes)
    json.dumps(found, allow_nan=False)
    first, second = found["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("é", -0.25, [0xC3, 0xA9])
    assert [entry["token"] for entry in first["top_logprobs"]] == ["é", "b"]
    assert [entry["bytes"] for entry in first["top_logprobs"]] == [[0xC3, 0xA9], [0xC3]]
    assert (second["token"], second["logprob"]) == ("token_id:9", LEAST)
    assert [entry["logprob"] for entry in second["top_logprobs"]] == [-0.5, -0.75]
    assert [entry["top_logprobs"] for entry in chat_logprobs([5, 9], PLACES, 0, own_bytes)["content"]] == [[], []]


def test_logprobs_as_a_completion_has_them():
    found = completion_logprobs([5, 9], PLACES, 2, [10, 11])
    assert found["tokens"] == ["é", "token_id:9"]
    assert found["text_offset"] == [10, 11]
    assert found["token_logprobs"] == [-0.25, LEAST]
    assert found["top_logprobs"] == [{"é": -0.25, "b": -2.0}, {"b": -0.5, "token_id:9": LEAST}]
    echoed = completion_logprobs([3, 5], [None, PLACES[0]], 1, [0, 3], decode=lambda token: f"<{token}>")
    assert echoed["tokens"] == ["<3>", "é"]
    assert echoed["text_offset"] == [0, 3]
    assert (echoed["token_logprobs"], echoed["top_logprobs"]) == ([None, -0.25], [None, {"é": -0.25}])


@pytest.mark.parametrize("family", FAMILIES)
def test_offsets_are_places_in_the_text(family):
    """Special tokens that the text leaves out have no length, and a character belongs to the last of its tokens."""
    made = FAMILIES[family]()
    tokens = made.encode("the cat sat, déjà x")
    tokens = [made.special[0], *tokens, made.special[0], *tokens]
    text, offsets = made.decode(tokens), TextOffsets(made.decode)
    found = [*offsets.add(tokens[:3]), *offsets.add(tokens[3:])]
    assert found == sorted(found)
    assert found[:2] == [0, 0]
    ends = [*found[1:], len(text)]
    pieces = [text[start:end] for start, end in zip(found, ends, strict=True)]
    assert "".join(pieces) == text
    assert pieces[0] == ""
    shifted = TextOffsets(made.decode, tokens[:4], start=7).add(tokens[4:])
    assert shifted[0] == 7


def test_tokens_without_a_tokenizer_count_as_their_ids():
    assert TextOffsets(None, start=3).add([7, 12]) == [3, 3 + len("token_id:7")]


def test_logprobs_of_a_prompt_as_vllm_has_them():
    found = prompt_logprobs([None, PLACES[1]])
    assert found[0] is None
    assert found[1] is not None
    assert found[1]["9"] == {"logprob": LEAST, "rank": 40, "decoded_token": None}
    assert list(found[1]) == ["9", "6", "7"]
