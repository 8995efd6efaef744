"""``SamplingParams`` from the fields of a request, and the errors of the engine in terms of these fields."""

import dataclasses
import json
import re
from typing import Any

from jspec.sampling.params import SamplingParams
from jspec.sampling.structured import StructuredOutputsParams
from jspec.serving.generation.protocol import ChatRequest, CompletionRequest, GenerationRequest
from jspec.serving.http.errors import ApiError, require_that, wrong
from jspec.serving.http.limits import Limits

# Fields of a request that are fields of SamplingParams as they are.
_COMPUTED = {"n", "max_tokens", "logit_bias", "prompt_logprobs", "structured_outputs"}
_PASSED_ON = GenerationRequest.model_fields.keys() & {f.name for f in dataclasses.fields(SamplingParams)} - _COMPUTED


def num_choices(request: GenerationRequest, num_prompts: int, limits: Limits, room: int | None) -> int:
    """The number of completions of a request, over all its prompts.

    Args:
      room: how many requests an idle engine takes; None is any number.

    Raises:
      ApiError: ``n`` is out of range, or there are too many completions.
    """
    n = 1 if request.n is None else request.n
    require_that(1 <= n <= limits.max_n, "n", n, f"an integer in 1..{limits.max_n} (--max-n)")
    total = n * num_prompts
    most = limits.max_choices if room is None else min(limits.max_choices, room)
    if total > most:
        raise ApiError(400, f"{num_prompts} prompts with n={n} are {total} completions: expected at most {most}", "n")
    return total


def params_of(request: GenerationRequest, defaults: SamplingParams, limits: Limits) -> SamplingParams:
    """The sampling parameters of a request; missing fields come from ``defaults``.

    Raises:
      ApiError: 400; a value is out of range or not supported.
    """
    _check_sizes(request, limits)
    wanted = {name: getattr(request, name) for name in _PASSED_ON if getattr(request, name) is not None}
    wanted["max_tokens"] = _max_tokens(request)
    wanted["logit_bias"] = _logit_bias(request)
    wanted["logprobs"], wanted["prompt_logprobs"] = _logprobs(request, limits)
    wanted["structured_outputs"] = structured_outputs_of(request, limits)
    try:
        return dataclasses.replace(defaults, **wanted)
    except (ValueError, TypeError) as error:
        raise of_value_error(error, request) from None


def of_value_error(error: Exception, request: GenerationRequest, default: str = "") -> ApiError:
    """An error of the engine as one of the request's field.

    Messages of the engine begin with a field, as in ``top_p=2: ..``, ``stop has ..`` and ``structured_outputs needs ..``, or
    with the prompt, which it calls ``prompt 0``, and a field may follow: ``prompt 0: logit_bias has ..``.

    Args:
      default: the prompt's name in the request, ``messages`` or ``prompt[2]`` for example.
    """
    message = str(error)
    for name, called in (("structured_outputs", form_field(request)), ("thinking_budget", "thinking_token_budget")):
        message = re.sub(rf"\b{name}\b", called, message, count=1)
    field = re.match(r"(?:prompt 0: )?(\w+)(?:\[[^\]]*\])?(?:=|: | has | needs )", message)
    if field and field[1] in type(request).model_fields:
        return ApiError(400, message.removeprefix("prompt 0: "), field[1])
    return ApiError(400, message.replace("prompt 0", default, 1), default.partition("[")[0] or None)


def _max_tokens(request: GenerationRequest) -> int | None:
    """The most new tokens; None is the rest of the context, the default of a chat."""
    if isinstance(request, CompletionRequest) and request.wants_prompt_alone:
        return 1  # which the response leaves out
    if not isinstance(request, ChatRequest) or request.max_completion_tokens is None:
        return request.max_tokens
    newer = request.max_completion_tokens
    require_that(newer >= 1, "max_completion_tokens", newer, "an integer of at least 1")
    return newer


def _logit_bias(request: GenerationRequest) -> dict[int, float]:
    """The bias by token id; in JSON the ids are strings: ``{"50256": -100}``."""
    bias: dict[int, float] = {}
    for name, value in (request.logit_bias or {}).items():
        ok = name.isascii() and name.isdecimal() and len(name) <= 10
        require_that(ok and int(name) not in bias, "logit_bias", name, "token ids as names, each once")
        require_that(-100 <= value <= 100, "logit_bias", value, "numbers in -100..100")
        bias[int(name)] = value
    return bias


def _logprobs(request: GenerationRequest, limits: Limits) -> tuple[int | None, int | None]:
    """``SamplingParams.logprobs`` and ``SamplingParams.prompt_logprobs``."""
    most, count = limits.max_logprobs, None
    if isinstance(request, CompletionRequest):
        count = request.logprobs
        _check_count("logprobs", count, most)
    elif isinstance(request, ChatRequest):
        top = request.top_logprobs
        _check_count("top_logprobs", top, most)
        if top and not request.logprobs:
            raise wrong("top_logprobs", top, "logprobs=true beside it")
        count = (top or 0) if request.logprobs else None
    prompt = request.prompt_logprobs
    _check_count("prompt_logprobs", prompt, most)
    if prompt is not None and request.stream:
        raise wrong("prompt_logprobs", prompt, "stream=false beside it")
    if isinstance(request, CompletionRequest) and request.echo and count is not None:
        prompt = max(count, prompt or 0)
    return count, prompt


def _check_count(name: str, count: int | None, most: int):
    require_that(count is None or 0 <= count <= most, name, count, f"an integer in 0..{most} (--max-logprobs)")


def _check_sizes(request: GenerationRequest, limits: Limits):
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    longest = max([*map(len, stop), *map(len, request.bad_words or ())], default=0)
    if longest > limits.max_stop_length:
        name = "stop" if any(len(text) == longest for text in stop) else "bad_words"
        message = f"{name} has a text of {longest} characters: expected at most {limits.max_stop_length}"
        raise ApiError(400, f"{message} (--max-stop-length)", name)
    options = request.stream_options
    shown = options and options.model_dump(exclude_none=True)
    require_that(options is None or bool(request.stream), "stream_options", shown, "stream=true beside it")


def structured_outputs_of(request: GenerationRequest, limits: Limits) -> StructuredOutputsParams | None:
    """The structured outputs of a request; None if it has none.

    Raises:
      ApiError: 400; both fields are given, or one of them cannot be used.
    """
    by_name = {"response_format": request.response_format, "structured_outputs": request.structured_outputs}
    for name, value in by_name.items():
        size = 0 if value is None else len(json.dumps(value))
        if size > limits.max_grammar_bytes:
            most = f"expected at most {limits.max_grammar_bytes} (--max-grammar-bytes)"
            raise ApiError(400, f"{name} has {size} characters: {most}", name)
    wanted = _of_response_format(request.response_format)
    if request.structured_outputs:
        require_that(not wanted, "response_format", request.response_format, "nothing beside structured_outputs")
        wanted = request.structured_outputs
    if not wanted:
        return None
    try:
        return StructuredOutputsParams.of({name: value for name, value in wanted.items() if value is not None})
    except (ValueError, TypeError) as error:
        raise ApiError(400, str(error), form_field(request)) from None


def form_field(request: GenerationRequest) -> str:
    """The field of a request that the form of its text comes from."""
    if request.structured_outputs:
        return "structured_outputs"
    is_free = request.response_format in (None, {"type": "text"})
    return "tools" if is_free and getattr(request, "tools", None) else "response_format"


def _of_response_format(given: dict[str, Any] | None) -> dict[str, Any]:
    """OpenAI's field as fields of ``StructuredOutputsParams``."""
    if given is None or given == {"type": "text"}:
        return {}
    if given == {"type": "json_object"}:
        return {"json_object": True}
    described = given.get("json_schema")
    if given.get("type") == "json_schema" and isinstance(described, dict) and isinstance(described.get("schema"), dict):
        return {"json": described["schema"]}
    kinds = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {..}}}'
    raise wrong("response_format", given, kinds)
