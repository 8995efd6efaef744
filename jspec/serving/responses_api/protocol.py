"""Request bodies of ``/v1/responses``: the fields that jspec reads, and those that it refuses. Others are ignored, since
clients often send new."""

from typing import Any

from jspec.serving.generation.protocol import MODERATION, Body, ListOf, Unsupported


class ResponsesRequest(Body):
    """``/v1/responses``. ``input`` is text, or a list of items."""

    input: str | ListOf[dict[str, Any]] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    tools: ListOf[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: ListOf[str] | None = None
    metadata: dict[str, Any] | None = None
    background: bool | None = None
    prompt_cache_options: dict[str, Any] | None = None


# Fields that have no effect here, and of which the log says nothing.
WITHOUT_EFFECT = frozenset({"user", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier"})
WITHOUT_EFFECT |= {"client_metadata", "stream_options", "truncation", "max_tool_calls"}
WITHOUT_EFFECT |= {"access_programs", "background_options", "context_management", "image"}
_LOGPROBS = "only /v1/chat/completions and /v1/completions have log-probabilities"
UNSUPPORTED: Unsupported = {
    **MODERATION,
    "conversation": ((), "jspec stores responses, not conversations: use previous_response_id, or send all of input"),
    "prompt": ((), "jspec stores no prompts: put its text into instructions or input"),
    "top_logprobs": ((0,), _LOGPROBS),
}
# Sampling fields of jspec's own, which pass through.
PASSED_ON = ("seed", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "max_drafts")
PASSED_ON += ("cache_salt", "stop", "ignore_eos", "chat_template_kwargs", "structured_outputs")
