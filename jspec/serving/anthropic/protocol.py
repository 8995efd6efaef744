"""Request bodies of ``/v1/messages``: the fields that jspec reads. Others are ignored, since clients often send new ones."""

from typing import Any

from jspec.serving.openai.protocol import Body, ListOf


class CountTokensRequest(Body):
    """``/v1/messages/count_tokens``."""

    messages: ListOf[dict[str, Any]]
    system: Any = None
    tools: ListOf[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest):
    """``/v1/messages``."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: ListOf[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


# Fields that have no effect here, and of which the log says nothing.
WITHOUT_EFFECT = frozenset(
    {"metadata", "service_tier", "context_management", "inference_geo", "cache_control", "betas"}
)
# Sampling fields of jspec's own, which pass through.
PASSED_ON = ("seed", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "max_drafts", "cache_salt")
