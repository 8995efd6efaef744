"""Limits of the lists and objects in a request, checked before their entries are, since clients may send millions."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

from jspec.serving.http.errors import ApiError
from jspec.serving.http.limits import Limits
from jspec.text.detokenizer import COUNTED_CONTEXTS

MAX_NAMES = 64  # entries of an object with a fixed set of names

# Field -> the field of ``Limits`` with the number of entries.
_LIMITS = {
    "messages": "max_messages",
    "tools": "max_tools",
    "documents": "max_documents",
    "stop": "max_stop_strings",
    "stop_sequences": "max_stop_strings",
    "input": "max_messages",
    "stop_token_ids": "max_stop_token_ids",
    "logit_bias": "max_logit_bias",
    "bad_words": "max_bad_words",
}
_OBJECTS = (
    "stream_options",
    "response_format",
    "structured_outputs",
    "sampling_params",
    "chat_template_kwargs",
    "tool_choice",
    "thinking",
)
_OBJECTS += (
    "output_config",
    "output_format",
    "prompt_cache_options",
    "reasoning",
    "text",
    "metadata",
    "include",
    "thread",
)


class Most(NamedTuple):
    """The most entries of a field, and the reason for messages."""

    entries: int
    why: str


def most_entries(limits: Limits, vocab_size: int, max_len: int) -> dict[str, Most]:
    """The most entries of each field that is a list or an object.

    Args:
      limits: the server's.
      vocab_size: V of the target.
      max_len: S, the model's context.
    """
    most = {name: Most(getattr(limits, of), f" (--{of.replace('_', '-')})") for name, of in _LIMITS.items()}
    most["allowed_token_ids"] = Most(vocab_size, ", the tokens of the model's vocabulary")
    most["tokens"] = Most(COUNTED_CONTEXTS * max_len, f", {COUNTED_CONTEXTS} contexts of the model")
    return most | dict.fromkeys(_OBJECTS, Most(MAX_NAMES, ""))


def require_few(kind: type[BaseModel], given: Mapping[str, Any], most: Mapping[str, Most]):
    """Check the number of entries of lists and objects.

    Fields whose entries pydantic does not check, ``prompt`` for example, are checked where they are read.

    Raises:
      ApiError: 400, with the field's name.
    """
    for name, value in given.items():
        if name in most and name in kind.model_fields and isinstance(value, list | dict):
            entries, why = most[name]
            if len(value) > entries:
                raise ApiError(400, f"{name} has {len(value)} entries: expected at most {entries}{why}", name)
