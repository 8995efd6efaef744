"""What clients send: the fields of OpenAI's requests, and those that vLLM adds to them.

Values are what JSON says they are: ``"1"`` is no number, and ``null`` is the same as no value at all.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jspec.serving.openai.errors import ApiError, shown, wrong
from jspec.serving.openai.list_limits import Most, require_few

T = TypeVar("T")
# The first entry that is wrong ends validation, which would otherwise make an error for each.
ListOf = Annotated[list[T], Field(fail_fast=True)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None


class StreamOptions(BaseModel):
    """What a stream has besides the text.

    Attributes:
      include_usage: a last chunk with the numbers of tokens.
      continuous_usage_stats: these numbers in every chunk.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(_Body):
    """What requests for completions and for chat answers have in common."""

    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | ListOf[str] | None = None
    stop_token_ids: ListOf[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: ListOf[int] | None = None
    bad_words: ListOf[str] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    max_drafts: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_token_sources: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest):
    """``/v1/completions``. ``prompt`` is text, token ids, or a list of either."""

    max_tokens: int | None = 16
    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None


class ChatFields(_Body):
    """What a prompt is made of by the chat template."""

    messages: ListOf[dict[str, Any]]
    tools: ListOf[dict[str, Any]] | None = None
    documents: ListOf[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(GenerationRequest, ChatFields):
    """``/v1/chat/completions``."""

    max_completion_tokens: int | None = None
    tool_choice: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TokenizeRequest(_Body):
    """``/tokenize`` of a text."""

    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatFields):
    """``/tokenize`` of a chat."""

    return_token_strs: bool | None = None


class DetokenizeRequest(_Body):
    """``/detokenize``."""

    tokens: ListOf[int]


# Fields that change nothing about the answer here.
_WITHOUT_EFFECT = {
    *("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("parallel_tool_calls", "request_id"),
}
_GUIDED = "use structured_outputs"
_BEAMS = "jspec samples and has no beam search"
# Fields that jspec does not have -> the values under which they ask for nothing, and what to say to others. None and an
# empty list or object always ask for nothing.
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((1,), _BEAMS),
    "use_beam_search": ((False,), _BEAMS),
    "length_penalty": ((1,), _BEAMS),
    "suffix": (("",), "text is completed at its end alone"),
    "echo": ((False,), "only /v1/completions has it"),
    "spaces_between_special_tokens": ((True,), "the tokenizer decides it"),
    "return_tokens_as_token_ids": ((False,), "use return_token_ids"),
    "include_reasoning": ((True,), "reasoning is part of the text"),
    "reasoning_effort": ((), "give chat_template_kwargs, if the model's template knows it"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "modalities": ((["text"],), "jspec writes text"),
    "audio": ((), "jspec writes text"),
    "prediction": ((), "jspec drafts with its own drafter"),
    "functions": ((), "use tools"),
    "function_call": (("none", "auto"), "use tools"),
    "web_search_options": ((), "jspec searches nothing"),
    "verbosity": ((), "not supported"),
    "chat_template": ((), "a template comes from the checkpoint, or from --chat-template, never from a request"),
    "prompt_embeds": ((), "give text or token ids"),
    "guided_json": ((), _GUIDED),
    "guided_regex": ((), _GUIDED),
    "guided_choice": ((), _GUIDED),
    "guided_grammar": ((), _GUIDED),
    "guided_decoding_backend": ((), _GUIDED),
    "guided_whitespace_pattern": ((), _GUIDED),
    "structural_tag": ((), _GUIDED),
    "logits_processors": ((), "not supported"),
    "mm_processor_kwargs": ((), "jspec reads text alone"),
    "kv_transfer_params": ((), "not supported"),
    "vllm_xargs": ((), "not supported"),
}

B = TypeVar("B", bound=_Body)


def parsed(kind: type[B], body: dict[str, Any], most: Mapping[str, Most]) -> B:
    """The request that a body is.

    Args:
      kind: what it is to be.
      body: the JSON object.
      most: for each field that is a list or an object, how many entries it may have; of ``list_limits.most_entries``.

    Raises:
      ApiError: 400, with the field's name: it is missing, of another type, too long, unknown, or asks for what jspec
        cannot do.
    """
    # None is no value; defaults take its place, except where None means something else than they do.
    given = {name: value for name, value in body.items() if value is not None or name == "max_tokens"}
    require_few(kind, given, most)
    try:
        request = kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error) from None
    for name, value in (request.model_extra or {}).items():
        if name not in _WITHOUT_EFFECT:
            _require_nothing(kind, name, value)
    return request


def _refusal(error: ValidationError) -> ApiError:
    """What is wrong with the first field that is, in one sentence."""
    details = error.errors(include_url=False, include_context=False)
    param = str(details[0]["loc"][0])
    same = [detail for detail in details if str(detail["loc"][0]) == param]
    if same[0]["type"] == "missing":
        return ApiError(400, f"{param} is missing", param)
    reasons = dict.fromkeys(detail["msg"].removeprefix("Input should be ") for detail in same[:8])
    return ApiError(400, f"{param}={shown(same[0]['input'])}: expected {' or '.join(reasons)}", param)


def _require_nothing(kind: type[_Body], name: str, value: Any):
    if name in _UNSUPPORTED:
        neutral, hint = _UNSUPPORTED[name]
        if not (value == [] or value == {} or any(_same(value, one) for one in neutral)):
            raise ApiError(400, f"{name}={shown(value)} is not supported: {hint}; leave it out", name)
        return
    near = difflib.get_close_matches(name[:64], kind.model_fields, n=1)
    hint = f"did you mean {near[0]}?" if near else "leave it out"
    raise ApiError(400, f"unknown field {shown(name)}: {hint}", name)


def _same(value: Any, one: Any) -> bool:
    """Equality that keeps True and 1 apart."""
    return isinstance(value, bool) == isinstance(one, bool) and value == one


def token_ids(param: str, value: Any) -> list[int]:
    """A list of token ids, as JSON has it.

    Raises:
      ApiError: it is none.
    """
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise wrong(param, value, "a list of token ids")
    return value
