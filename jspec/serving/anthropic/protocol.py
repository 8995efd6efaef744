"""Request bodies of ``/v1/messages``: the fields that jspec reads, and those that it refuses. Others are ignored, since
clients often send new ones."""

from typing import Any

from jspec.serving.generation.protocol import Body, ListOf, Unsupported


class CountTokensRequest(Body):
    """``/v1/messages/count_tokens``."""

    messages: ListOf[dict[str, Any]]
    system: Any = None
    tools: ListOf[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    thread: Any = None


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
    {"metadata", "service_tier", "context_management", "inference_geo", "cache_control", "betas", "billing_policy"}
) | {"diagnostics", "fallback_credit_token", "fallbacks", "speed", "user_profile_id", "workspace_id"}
UNSUPPORTED: Unsupported = {
    "compaction": ((), "jspec summarizes nothing: send a message that asks for a summary"),
    "container": ((), "jspec runs no containers and has no skills"),
    "mcp_servers": ((), "jspec calls no servers: have the client call their tools"),
}
# Sampling fields of jspec's own, which pass through.
PASSED_ON = ("seed", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "max_drafts", "cache_salt")
