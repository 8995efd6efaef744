"""Limits of a request, which are checked before anything is allocated."""

import dataclasses
from typing import Any


def _limit(default: float, of: str) -> Any:
    """A limit, and what it is of."""
    return dataclasses.field(default=default, metadata={"help": of})


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a request. Each is an option of ``jspec serve``."""

    max_connections: int = _limit(4096, "connections at a time; fewer if the process may not have as many open files")
    max_header_seconds: float = _limit(30.0, "seconds until the headers have arrived, and for the handshake of TLS")
    max_body_bytes: int = _limit(8 * 2**20, "bytes of a request's body")
    max_pending_bytes: int = _limit(
        64 * 2**20, "bytes of all bodies that are arriving or being parsed; then the response is 429"
    )
    max_body_seconds: float = _limit(60.0, "seconds until the body has arrived")
    max_json_depth: int = _limit(64, "levels of nested objects and lists in the body")
    max_json_values: int = _limit(2**19, "entries of all lists and objects in the body")
    max_prompts: int = _limit(256, "prompts of a request")
    max_n: int = _limit(64, "completions of each prompt")
    max_choices: int = _limit(256, "completions of a request, which are prompts times n")
    max_messages: int = _limit(4096, "messages of a chat")
    max_tools: int = _limit(256, "tools of a chat")
    max_documents: int = _limit(256, "documents of a chat")
    max_stop_strings: int = _limit(16, "stop strings")
    max_stop_length: int = _limit(1000, "characters of a stop string")
    # ``MAX_STOP_TOKENS``; not imported, because a supervisor has no numpy
    max_stop_token_ids: int = _limit(128, "entries of ``stop_token_ids``")
    max_logprobs: int = _limit(20, "log-probabilities of the likeliest tokens, for each token")
    max_logprob_entries: int = _limit(2**21, "log-probabilities of a response that is no stream")
    max_logit_bias: int = _limit(1024, "entries of ``logit_bias``")
    max_bad_words: int = _limit(128, "entries of ``bad_words``")
    max_grammar_bytes: int = _limit(2**16, "characters of ``response_format`` or ``structured_outputs``, as JSON")
    max_grammar_seconds: float = _limit(3.0, "CPU seconds in which a grammar is compiled")
    max_grammar_memory: int = _limit(256 * 2**20, "bytes of memory that compiling a grammar takes")
    max_grammar_wait: float = _limit(
        10.0, "seconds that a grammar waits until others have been compiled; then the response is 503"
    )
    max_cache_salt: int = _limit(256, "characters of ``cache_salt``")
    max_stored_responses: int = _limit(
        1000, "responses of ``/v1/responses`` that are kept for ``previous_response_id``"
    )
    max_stored_bytes: int = _limit(64 * 2**20, "bytes of these together")

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"{field.name}={value!r}: expected a number above 0")
        if self.max_pending_bytes < self.max_body_bytes:
            least = f"at least max_body_bytes={self.max_body_bytes}"
            raise ValueError(f"max_pending_bytes={self.max_pending_bytes!r}: expected {least}")
