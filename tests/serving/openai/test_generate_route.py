"""``/inference/v1/generate``: token ids in, and the tokens, log-probabilities and endings of ``jspec.generate`` out."""

import dataclasses

import pytest
from openai_server import ask, closing_service, error_of, events, family

import jspec
from jspec.outputs import Logprob
from jspec.serving.http.limits import Limits
from jspec.serving.openai.generate import _spans

PATH = "/inference/v1/generate"
PROMPT = [292, 655, 263, 8]  # "def main("
SEEDED = {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "seed": 7, "max_tokens": 12}
# What the client of ``renderers`` 0.1.12 sends for a turn of verifiers 0.4.0 that goes on from another.
ASKED = {"stop_token_ids": [0], "logprobs": 1, "skip_special_tokens": False, "routed_experts_prompt_start": 3}
BODY = {"model": "family", "token_ids": PROMPT, "sampling_params": {**SEEDED, **ASKED}}


@pytest.fixture(scope="module")
def service():
    yield from closing_service(limits=Limits(max_n=3, max_logprobs=5))


def generated(prompt=PROMPT, **params) -> jspec.Result:
    found = jspec.generate(family(), prompt, jspec.SamplingParams(**params))
    assert isinstance(found, jspec.Result)
    return found


def sampled(service, **params) -> dict:
    """The choice of a request with these ``sampling_params``."""
    answer = ask(service, PATH, {"token_ids": PROMPT, "sampling_params": params})
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    return choice


def entries(result: jspec.Result) -> list[dict]:
    def entry(token: int, known: Logprob) -> dict:
        return {"token": f"token_id:{token}", "token_id": token, "logprob": known.logprob, "rank": known.rank}

    assert result.logprobs is not None
    pairs = zip(result.token_ids, result.logprobs, strict=True)
    return [{**entry(t, place[t]), "top_logprobs": [entry(*pair) for pair in place.items()]} for t, place in pairs]


def test_the_answer_is_that_of_generate_in_every_field(service):
    answer = ask(service, PATH, BODY, headers={"x-request-id": "turn-2"})
    assert answer.status_code == 200, answer.text
    expected, body = generated(**SEEDED, logprobs=1), answer.json()
    assert [len(place) for place in expected.logprobs or ()] != [1] * 12  # other tokens were likelier somewhere
    assert abs(body.pop("created") - service.created) < 3600
    assert body == {
        "request_id": "turn-2",
        "model": "family",
        "choices": [
            {
                "index": 0,
                "token_ids": expected.token_ids,
                "logprobs": {"content": entries(expected)},
                "finish_reason": "length",
                "stop_reason": None,
                "weight_versions": [{"version": expected.weights_versions[0][0], "start": 0, "end": 12}],
            }
        ],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 12,
            "total_tokens": 16,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "prompt_logprobs": None,
    }
    assert expected.token_logprobs is not None
    numbers = [entry["logprob"] for entry in body["choices"][0]["logprobs"]["content"]]
    assert numbers == expected.token_logprobs.tolist()


def test_chunks_join_to_the_whole_answer(service):
    [whole] = ask(service, PATH, BODY).json()["choices"]
    options = {"stream": True, "stream_options": {"include_usage": True}, "request_id": "mine"}
    *chunks, last = events(ask(service, PATH, {**BODY, **options}))
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 12)
    assert len(chunks) > 1
    assert {chunk["request_id"] for chunk in chunks} == {"mine"}
    parts = [chunk["choices"][0] for chunk in chunks]
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    assert [entry for part in parts for entry in part["logprobs"]["content"]] == whole["logprobs"]["content"]
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert ["weight_versions" in part for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1]["weight_versions"] == whole["weight_versions"]


def test_what_ends_a_completion(service):
    tokens = sampled(service, **SEEDED)["token_ids"]
    choice = sampled(service, **SEEDED, stop_token_ids=[tokens[5]])
    end = tokens.index(tokens[5]) + 1
    assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == (tokens[:end], "stop", tokens[5])
    assert choice["logprobs"] is None
    text = generated(**SEEDED).text or ""
    choice, expected = sampled(service, **SEEDED, stop=text[3:6]), generated(**SEEDED, stop=text[3:6])
    assert (choice["token_ids"], choice["stop_reason"]) == (expected.token_ids, text[3:6])
    assert choice["finish_reason"] == expected.finish_reason == "stop"


def test_open_settings_are_those_of_sampling_params_and_not_of_the_checkpoint(service):
    defaults = family().default_sampling_params
    assert (defaults.temperature, defaults.top_p) == (0.8, 0.95)
    expected = generated(seed=3, max_tokens=40)
    assert sampled(service, seed=3, max_tokens=40)["token_ids"] == expected.token_ids
    assert generated(temperature=0.8, top_p=0.95, seed=3, max_tokens=40).token_ids != expected.token_ids
    rest = sampled(service, temperature=0, allowed_token_ids=[5])  # no end of sequence among them
    assert (len(rest["token_ids"]), rest["finish_reason"]) == (256 - len(PROMPT), "length")


def test_completions_of_one_prompt_and_the_log_probabilities_of_it(service):
    params = {**SEEDED, "n": 2, "prompt_logprobs": 1, "logprobs": 0, "logprobs_mode": "processed_logprobs"}
    answer = ask(service, PATH, {"token_ids": PROMPT, "sampling_params": params, "return_token_ids": True}).json()
    processed = {"logprobs": 0, "logprobs_mode": "processed_logprobs"}
    results = [generated(**{**SEEDED, **processed, "seed": 7 + i}, prompt_logprobs=1) for i in range(2)]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice, expected in zip(answer["choices"], results, strict=True):
        assert (choice["token_ids"], choice["logprobs"]["content"]) == (expected.token_ids, entries(expected))
    raw = sampled(service, **SEEDED, logprobs=0)["logprobs"]["content"]
    assert raw != answer["choices"][0]["logprobs"]["content"]
    assert answer["prompt_token_ids"] == PROMPT
    places = results[0].prompt_logprobs
    assert places is not None
    first, *others = answer["prompt_logprobs"]
    assert first is None
    numbers = [{int(token): known["logprob"] for token, known in place.items()} for place in others]
    assert numbers == [{token: known.logprob for token, known in (place or {}).items()} for place in places[1:]]
    assert answer["usage"]["completion_tokens"] == 24


def test_ranges_of_tokens_have_the_versions_of_their_weights():
    result = generated(temperature=0, max_tokens=5)
    two = dataclasses.replace(result, weights_versions=((0, 0), ("step 1", 3)))
    spans = [{"version": 0, "start": 0, "end": 3}, {"version": "step 1", "start": 3, "end": 5}]
    assert list(_spans(two)) == spans
    assert list(_spans(dataclasses.replace(result, token_ids=[], weights_versions=()))) == []


def inside(**params) -> dict:
    return {"sampling_params": params}


REFUSED = [  # (fields, the field that is named, what the message has)
    ({"token_ids": None}, "token_ids", "token_ids is missing"),
    ({"token_ids": []}, "token_ids", "token_ids is empty: expected at least one token"),
    ({"token_ids": "def main("}, "token_ids", "expected a valid list"),
    ({"token_ids": [1, "a"]}, "token_ids", "expected a list of token ids"),
    ({"token_ids": [True]}, "token_ids", "expected a list of token ids"),
    ({"token_ids": [1, 2048]}, "token_ids", "token_ids has token id 2048: expected 0..2047"),
    ({"token_ids": [7] * 256}, "token_ids", "maximum context length is 256 tokens. However, your token_ids"),
    ({"token_ids": [7] * 1025}, "token_ids", "(prompt is too long: 1025 tokens > 255 maximum)"),
    ({"sampling_params": 7}, "sampling_params", "expected a valid dictionary"),
    (inside(**{f"x{i}": 1 for i in range(65)}), "sampling_params", "at most 64"),
    (inside(temperature=-1), "sampling_params.temperature", "sampling_params.temperature=-1"),
    (inside(temperature="1"), "sampling_params.temperature", "expected a valid number"),
    (inside(n=4), "sampling_params.n", "--max-n"),
    (inside(logprobs=6), "sampling_params.logprobs", "0..5 (--max-logprobs)"),
    (inside(logprobs_mode="raw"), "sampling_params.logprobs_mode", "'processed_logprobs'"),
    (inside(max_tokens=0), "sampling_params.max_tokens", "max_tokens=0"),
    (inside(stop_token_ids=[5000]), "sampling_params.stop_token_ids", "5000"),
    (inside(temprature=1), "temprature", "unknown field 'temprature': did you mean temperature?"),
    (inside(stream=True), "sampling_params.stream", "unknown field 'sampling_params.stream'"),
    (inside(prompt="a"), "sampling_params.prompt", "unknown field 'sampling_params.prompt'"),
    (inside(extra_args={"a": 1}), "extra_args", "not supported"),
    (inside(repetition_detection={"min_count": 2}), "repetition_detection", "unknown field"),
    ({"temperature": 1}, "temperature", "unknown field 'temperature'"),
    ({"features": {"mm_hashes": {}}}, "features", "jspec reads text alone"),
    ({"content_parts": [{"type": "image_url"}]}, "content_parts", "jspec reads text alone"),
    ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params", "not supported"),
    ({"output_mode": "text"}, "output_mode", "/v1/completions gives text"),
    ({"request_id": 7}, "request_id", "expected a valid string"),
    ({"priority": 1}, "priority", "--scheduling-policy"),
    ({"cache_salt": ""}, "cache_salt", "1 to 256"),
    ({"stream": True, "return_token_ids": True}, "return_token_ids", "stream=false beside it"),
    ({"stream": True, **inside(prompt_logprobs=1)}, "sampling_params.prompt_logprobs", "stream=false beside it"),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_bad_requests_are_refused_by_name(service, fields, param, message):
    before = family().engine.metrics().num_finished
    error = error_of(ask(service, PATH, {**BODY, **fields}), 400)
    assert error["param"] == param
    assert message in error["message"]
    assert family().engine.metrics().num_finished == before


def test_fields_without_effect_change_nothing(service):
    [plain] = ask(service, PATH, BODY).json()["choices"]
    nothing = {
        "features": None,
        "kv_transfer_params": None,
        "content_parts": None,
        "output_mode": "tokens",
        "priority": 0,
    }
    params = {**BODY["sampling_params"], "detokenize": False, "output_kind": 2, "flat_logprobs": True, "min_p": None}
    [choice] = ask(service, PATH, {**BODY, **nothing, "sampling_params": params, "cache_salt": "a"}).json()["choices"]
    assert choice == plain
    bare = ask(service, PATH, {"token_ids": PROMPT, "sampling_params": None}).json()
    assert bare["model"] == "family"
    assert error_of(ask(service, PATH, {**BODY, "model": "none"}), 404)["param"] == "model"
