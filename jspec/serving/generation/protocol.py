"""Request bodies: the fields of OpenAI's requests, and vLLM's additions.

Types are strict: ``"1"`` is not a number. ``null`` is the same as a missing field.
"""

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jspec.serving.generation.list_limits import Most, require_few
from jspec.serving.http.errors import ApiError, shown

MAX_REASONS = 8  # errors of a field that are looked at
MAX_NAME = 64  # characters of a name that an error quotes

T = TypeVar("T")
# The first entry that is wrong ends validation, which would otherwise make an error for each.
ListOf = Annotated[list[T], Field(fail_fast=True)]


class Body(BaseModel):
    """What all request bodies have in common."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None


class StreamOptions(BaseModel):
    """The usage statistics in a stream.

    Attributes:
      include_usage: whether a last chunk has the numbers of tokens.
      continuous_usage_stats: whether every chunk has them.
      include_obfuscation: accepted and ignored; OpenAI pads chunks, so that their lengths tell less.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(Body):
    """Fields of both completion and chat requests."""

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
    logprobs_mode: str | None = None
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

    @property
    def wants_prompt_alone(self) -> bool:
        """Whether the response is the prompt, with its log-probabilities perhaps, and no new token."""
        return bool(self.echo) and self.max_tokens == 0


class ChatFields(Body):
    """Fields from which the chat template makes the prompt."""

    messages: ListOf[dict[str, Any]]
    tools: ListOf[dict[str, Any]] | None = None
    tool_choice: Any = None
    documents: ListOf[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ChatRequest(GenerationRequest, ChatFields):
    """``/v1/chat/completions``."""

    max_completion_tokens: int | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TokenizeRequest(Body):
    """``/tokenize`` of a text."""

    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatFields):
    """``/tokenize`` of a chat."""

    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """``/detokenize``."""

    tokens: ListOf[int]


# Fields that are accepted and ignored.
_WITHOUT_EFFECT = {"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
_WITHOUT_EFFECT |= {"prompt_cache_options", "request_id"}
_GUIDED = "use structured_outputs"
_BEAMS = "jspec samples and has no beam search"
# Unsupported fields -> their neutral values, which are accepted, and a hint for other values. None and an empty list or
# object are always neutral.
Unsupported = Mapping[str, tuple[tuple[Any, ...], str]]
MODERATION: Unsupported = {"moderation": ((), "jspec moderates nothing")}
_UNSUPPORTED: Unsupported = {
    **MODERATION,
    "best_of": ((1,), _BEAMS),
    "use_beam_search": ((False,), _BEAMS),
    "length_penalty": ((1,), _BEAMS),
    "suffix": (("",), "text is completed only at its end"),
    "echo": ((False,), "only /v1/completions has it"),
    "spaces_between_special_tokens": ((True,), "the tokenizer decides it"),
    "return_tokens_as_token_ids": ((False,), "use return_token_ids"),
    "parallel_tool_calls": ((True, False), "only /v1/chat/completions has it"),
    "include_reasoning": ((True,), "only /v1/chat/completions has it"),
    "thinking_token_budget": ((), "only /v1/chat/completions has it"),
    "reasoning_effort": ((), "only /v1/chat/completions has it"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "modalities": ((["text"],), "jspec writes text"),
    "audio": ((), "jspec writes text"),
    "prediction": ((), "jspec drafts with its own drafter"),
    "functions": ((), 'use tools, a list of {"type": "function", "function": ..}'),
    "function_call": (("none", "auto"), "use tool_choice"),
    "web_search_options": ((), "jspec searches nothing"),
    "verbosity": (("medium",), "jspec has nothing like it"),
    "chat_template": ((), "a template comes from the checkpoint, or from --chat-template, never from a request"),
    "prompt_embeds": ((), "give text or token ids"),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ((), _GUIDED)),
    **dict.fromkeys(("guided_decoding_backend", "guided_whitespace_pattern", "structural_tag"), ((), _GUIDED)),
    "logits_processors": ((), "jspec has nothing like it"),
    **dict.fromkeys(("mm_processor_kwargs", "features", "content_parts"), ((), "jspec reads text alone")),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params"), ((), "jspec has nothing like it")),
    "output_mode": (("tokens",), "only token ids come back; /v1/completions gives text"),
    **dict.fromkeys(("vllm_xargs", "extra_args"), ((), "jspec has nothing like it")),
}

B = TypeVar("B", bound=Body)


def parsed(kind: type[B], body: dict[str, Any], most: Mapping[str, Most]) -> B:
    """A request body, validated.

    Args:
      kind: the type of the request.
      body: the JSON object.
      most: the most entries of each field that is a list or an object; of ``list_limits.most_entries``.

    Raises:
      ApiError: 400, with the field's name: it is missing, of another type, too long, unknown, or not supported.
    """
    request = read_fields(kind, body, most)
    for name, value in (request.model_extra or {}).items():
        if name not in _WITHOUT_EFFECT:
            _require_nothing(kind, name, value)
    return request


def read_fields(kind: type[B], body: dict[str, Any], most: Mapping[str, Most]) -> B:
    """A request body whose known fields are validated, and which may have others; the arguments are those of ``parsed``.

    Raises:
      ApiError: 400, with the field's name: it is missing, of another type, or too long.
    """
    # None means the default, except for max_tokens, where it means no limit.
    fields = {name: value for name, value in body.items() if value is not None or name == "max_tokens"}
    require_few(kind, fields, most)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error, fields) from None


def _refusal(error: ValidationError, given: Mapping[str, Any]) -> ApiError:
    """The error of the first bad field, in one sentence, with the path to what is wrong in it."""
    details = error.errors(include_url=False, include_context=False)
    first = details[0]["loc"][0]
    paths = [_path(detail["loc"], given) for detail in details[:MAX_REASONS] if detail["loc"][0] == first]
    path = max(paths, key=len)  # of a field of several types, that of the type which the value has
    same = [detail for detail, other in zip(details, paths, strict=False) if other == path]
    kind = same[0]["type"]
    if kind == "missing":
        return ApiError(400, f"{path} is missing", path)
    if kind == "extra_forbidden":
        return ApiError(400, f"unknown field {shown(path)}: leave it out", path)
    reasons = dict.fromkeys(
        detail["msg"].removeprefix("Input should be ").partition(" or instance of ")[0] for detail in same
    )
    return ApiError(400, f"{path}={shown(same[0]['input'])}: expected {' or '.join(reasons)}", path)


def _path(places: Sequence[int | str], given: Any) -> str:
    """``tools[0].function`` from pydantic's places, among which are names of types, where a field takes several."""
    path = ""
    for place in places:
        if isinstance(place, int):
            path += f"[{place}]"
            given = given[place] if isinstance(given, list) and place < len(given) else None
        elif isinstance(given, Mapping):
            path += f".{place[:MAX_NAME]}" if path else place[:MAX_NAME]
            given = given.get(place)
    return path


def _require_nothing(kind: type[Body], name: str, value: Any):
    if name in _UNSUPPORTED:
        _require_neutral(name, value, _UNSUPPORTED)
        return
    near = difflib.get_close_matches(name[:MAX_NAME], kind.model_fields, n=1)
    hint = f"did you mean {near[0]}?" if near else "leave it out"
    raise ApiError(400, f"unknown field {shown(name)}: {hint}", name)


def _require_neutral(name: str, value: Any, unsupported: Unsupported):
    neutral, hint = unsupported[name]
    if not (value == [] or value == {} or any(_same(value, known) for known in neutral)):
        raise ApiError(400, f"{name}={shown(value)} is not supported: {hint}; leave it out", name)


def unread(request: Body, known: Collection[str], unsupported: Unsupported) -> list[str]:
    """Names of fields that an endpoint does not read, for the log; those with line breaks, for example, in quotes.

    Args:
      known: names of further fields that are read, or that have no effect.
      unsupported: fields that change what the model reads or what comes back, so that they are not ignored.

    Raises:
      ApiError: 400; an unsupported field has another value than a neutral one.
    """
    for name, value in (request.model_extra or {}).items():
        if name in unsupported:
            _require_neutral(name, value, unsupported)
    known = {*known, *unsupported}
    names = sorted((request.model_extra or {}).keys() - known)[:MAX_REASONS]
    return [name[:MAX_NAME] if name.isprintable() else shown(name[:MAX_NAME]) for name in names]


def _same(value: Any, other: Any) -> bool:
    """Equality that distinguishes True from 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
