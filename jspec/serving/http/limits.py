"""Limits of a request, which are checked before anything is allocated."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a request. Each is an option of ``jspec serve``.

    Attributes:
      max_connections: connections at a time; fewer if the process may not have as many open files.
      max_header_seconds: seconds until the headers have arrived, and for the handshake of TLS.
      max_body_bytes: bytes of a request's body.
      max_pending_bytes: bytes of all bodies that are arriving or being parsed; then the response is 429.
      max_body_seconds: seconds until the body has arrived.
      max_json_depth: levels of nested objects and lists in the body.
      max_json_values: entries of all lists and objects in the body.
      max_prompts: prompts of a request.
      max_n: completions of each prompt.
      max_choices: completions of a request, which are prompts times n.
      max_messages: messages of a chat.
      max_tools: tools of a chat.
      max_documents: documents of a chat.
      max_stop_strings: stop strings.
      max_stop_length: characters of a stop string.
      max_stop_token_ids: entries of ``stop_token_ids``.
      max_logprobs: log-probabilities of the likeliest tokens, for each token.
      max_logprob_entries: log-probabilities of a response that is no stream.
      max_logit_bias: entries of ``logit_bias``.
      max_bad_words: entries of ``bad_words``.
      max_grammar_bytes: characters of ``response_format`` or ``structured_outputs``, as JSON.
      max_grammar_seconds: CPU seconds in which a grammar is compiled.
      max_grammar_memory: bytes of memory that compiling a grammar takes.
      max_grammar_wait: seconds that a grammar waits until others have been compiled; then the response is 503.
      max_cache_salt: characters of ``cache_salt``.
      max_stored_responses: responses of ``/v1/responses`` that are kept for ``previous_response_id``.
      max_stored_bytes: bytes of these together.
    """

    max_connections: int = 4096
    max_header_seconds: float = 30.0
    max_body_bytes: int = 8 * 2**20
    max_pending_bytes: int = 64 * 2**20
    max_body_seconds: float = 60.0
    max_json_depth: int = 64
    max_json_values: int = 2**19
    max_prompts: int = 256
    max_n: int = 64
    max_choices: int = 256
    max_messages: int = 4096
    max_tools: int = 256
    max_documents: int = 256
    max_stop_strings: int = 16
    max_stop_length: int = 1000
    max_stop_token_ids: int = 128  # ``MAX_STOP_TOKENS``; not imported, because a supervisor has no numpy
    max_logprobs: int = 20
    max_logprob_entries: int = 2**21
    max_logit_bias: int = 1024
    max_bad_words: int = 128
    max_grammar_bytes: int = 2**16
    max_grammar_seconds: float = 3.0
    max_grammar_memory: int = 256 * 2**20
    max_grammar_wait: float = 10.0
    max_cache_salt: int = 256
    max_stored_responses: int = 1000
    max_stored_bytes: int = 64 * 2**20

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"{field.name}={value!r}: expected a number above 0")
        if self.max_pending_bytes < self.max_body_bytes:
            least = f"at least max_body_bytes={self.max_body_bytes}"
            raise ValueError(f"max_pending_bytes={self.max_pending_bytes!r}: expected {least}")


LIMIT_HELP = {
    name.strip(): text.strip().removesuffix(".").removesuffix(";")
    for line in (Limits.__doc__ or "").splitlines()
    for name, colon, text in [line.partition(": ")]
    if colon and name.strip().startswith("max_")
}
