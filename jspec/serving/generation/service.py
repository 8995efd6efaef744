"""The served model with its engine, the server's settings, and the checks that need both."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jspec.engine.engine import QueueFull
from jspec.engine.request import Request
from jspec.llm import LLM
from jspec.sampling.params import SamplingParams
from jspec.sampling.structured import StructuredOutputsParams
from jspec.serving.async_engine import AsyncEngine, Group
from jspec.serving.generation.list_limits import Most, most_entries
from jspec.serving.generation.response_store import ResponseStore
from jspec.serving.http.auth import Keys
from jspec.serving.http.errors import ApiError
from jspec.serving.http.limits import Limits
from jspec.serving.http.loop_monitor import LoopMonitor
from jspec.serving.http.request_body import Bodies
from jspec.text.detokenizer import COUNTED_CONTEXTS, encode_within, kept_tokens
from jspec.text.grammar.grammars import CompiledGrammar
from jspec.text.grammar.process import GrammarBusy
from jspec.text.parsers.lexer import MarkerTokens
from jspec.text.token_bytes import TokenBytes

# Variables of well-known chat templates that a request may set. None of them names a file or code.
TEMPLATE_KWARGS = ("enable_thinking", "thinking", "reasoning_effort", "preserve_thinking")

GRAMMAR_RETRY = "5"  # seconds after which a client may retry a grammar

T = TypeVar("T")


@dataclasses.dataclass
class Service:
    """A model with an engine over it, and the settings of a server.

    Attributes:
      engine: serves the requests.
      names: names of the model for clients; the first is what ``/v1/models`` lists first, and what a request without a
        name means.
      keys: the API keys of clients.
      limits: of a request.
      chat_template: a Jinja template in place of the checkpoint's; None takes that one.
      template_kwargs: variables of the template that ``chat_template_kwargs`` may set.
      default_template_kwargs: variables of the template that requests leave to the server.
      tool_parser, reasoning_parser: names of the formats of calls and of reasoning in the model's text, of
        ``jspec.text.parsers``; None for none.
      priorities: whether requests may have a priority; else all are first come, first served.
      draining: whether the server is shutting down and refuses new requests.
      in_flight: number of requests under way.
      loop_monitor: measures the event loop that serves them.
      created: when this object was made, in seconds since 1970.
    """

    engine: AsyncEngine
    names: Sequence[str]
    keys: Keys = dataclasses.field(default_factory=Keys)
    limits: Limits = dataclasses.field(default_factory=Limits)
    chat_template: str | None = None
    template_kwargs: Sequence[str] = TEMPLATE_KWARGS
    priorities: bool = False
    draining: bool = False
    in_flight: int = 0
    loop_monitor: LoopMonitor = dataclasses.field(default_factory=LoopMonitor)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    default_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tool_parser: str | None = None
    reasoning_parser: str | None = None

    @functools.cached_property
    def bodies(self) -> Bodies:
        """Reads the bodies of requests."""
        return Bodies(self.limits)

    @functools.cached_property
    def stored_responses(self) -> ResponseStore:
        """The newest responses of ``/v1/responses``."""
        return ResponseStore(self.limits.max_stored_responses, self.limits.max_stored_bytes)

    @functools.cached_property
    def token_bytes(self) -> TokenBytes:
        """Gives the bytes of tokens."""
        return TokenBytes(self.llm.tokenizer)

    @functools.cached_property
    def marker_tokens(self) -> MarkerTokens:
        """The tokens that may mark calls and reasoning."""
        return MarkerTokens.of(self.llm.tokenizer)

    @property
    def llm(self) -> LLM:
        return self.engine.llm

    @property
    def max_len(self) -> int:
        """S, the longest prompt plus completion, in tokens."""
        return self.llm.engine.config.max_len

    @property
    def chats(self) -> bool:
        """Whether there is a chat template."""
        return bool(self.chat_template or getattr(self.llm.tokenizer, "chat_template", None))

    @property
    def room(self) -> int | None:
        """How many requests an idle engine takes at once; None is any number."""
        config = self.llm.engine.config
        return None if config.max_waiting is None else config.max_waiting + config.max_batch

    @functools.cached_property
    def most_entries(self) -> dict[str, Most]:
        """The most entries of each field of a request."""
        return most_entries(self.limits, self.llm.target.config.vocab_size, self.max_len)

    def require_model(self, name: str | None) -> str:
        """The name of the model in a request, checked.

        Raises:
          ApiError: 404.
        """
        if name is None:
            return self.names[0]
        if name not in self.names:
            message = f"the model {name[:256]!r} does not exist here: expected one of {', '.join(self.names)}"
            raise ApiError(404, message, "model", "model_not_found")
        return name

    def encoded(self, text: str, param: str, special: bool = True, kept: int | None = None) -> list[int]:
        """The tokens of a text; of one that will be truncated, at least the remaining ones.

        Args:
          text: the text.
          param: the field that it is in.
          special: whether the tokenizer adds its special tokens.
          kept: the request's ``truncate_prompt_tokens``: a text that will be cut to its last tokens may be of any length.

        Raises:
          ApiError: 400; there is no tokenizer, it fails, or the text is several times longer than the context.
        """
        tokenizer = self.llm.tokenizer
        if tokenizer is None:
            raise ApiError(400, f"{param} is text, but the model has no tokenizer: expected token ids", param)
        most = COUNTED_CONTEXTS * self.max_len if kept is None else kept_tokens(kept, self.max_len)
        try:
            tokens = encode_within(tokenizer, text, param, most, last=kept is not None, add_special_tokens=special)
        except ValueError as error:
            raise ApiError(400, str(error), param) from None
        if tokens is None:
            raise self.too_long(param)
        return tokens

    def decoded(self, token_ids: Sequence[int], special: bool = True) -> str:
        """The text of tokens, with special tokens unless ``special`` is False."""
        tokenizer = self.llm.tokenizer
        return "" if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=not special)

    def too_long(self, param: str, count: int | None = None) -> ApiError:
        """The error of a prompt that leaves no room for a new token, in the words by which clients recognise it.

        Args:
          param: the field.
          count: the prompt's tokens; None if they were not counted, because the text is several times too long.
        """
        tokens = f"{COUNTED_CONTEXTS * self.max_len} tokens or more" if count is None else f"{count} tokens"
        message = (
            f"This model's maximum context length is {self.max_len} tokens. However, your {param} resulted in {tokens} "
            f"(prompt is too long: {tokens} > {self.max_len - 1} maximum)."
        )
        return ApiError(400, message, param, "context_length_exceeded")

    def requests(
        self,
        prompt: Sequence[int],
        params: Sequence[SamplingParams],
        priority: int = 0,
        salt: str = "",
        tenant: str = "",
    ) -> list[Request]:
        """The engine's requests for completions of one prompt; the arguments are those of ``Engine.request``.

        Raises:
          ValueError: the engine cannot serve one; the message begins with a field of ``SamplingParams``, or the prompt.
        """
        return [self.llm.engine.request(prompt, p, priority=priority, salt=salt, tenant=tenant) for p in params]

    def require_room(self, tenant: str):
        """Check, as soon as a request of a tenant comes, that the queue has room for it.

        Raises:
          ApiError: 429.
        """
        try:
            self.llm.engine.require_room(tenant=tenant)
        except QueueFull as error:
            raise _too_many(error) from None

    async def prepare(self, work: Callable[[], T]) -> T:
        """The result of ``work``, run in another thread because it would block the event loop for too long.

        Raises:
          ApiError: 503; the engine is closed, or too busy with grammars.
          Exception: what ``work`` raised.
        """
        with self._unavailable():
            return await self.engine.prepare(work)

    async def grammar(self, form: StructuredOutputsParams | None) -> CompiledGrammar | None:
        """The compiled grammar of structured outputs; while it is referenced, requests with it need no compilation.

        Raises:
          ApiError: 503; the engine is closed, or too busy with grammars.
          ValueError: the grammar cannot be compiled; the message begins with ``structured_outputs``.
        """
        if form is None:
            return None
        with self._unavailable():
            return await self.engine.grammar(form)

    @contextlib.contextmanager
    def _unavailable(self) -> Iterator[None]:
        """Turn the engine's errors into 503 if it is closed, or too busy with grammars."""
        try:
            yield
        except GrammarBusy as error:
            raise ApiError(503, str(error), headers={"Retry-After": GRAMMAR_RETRY}) from None
        except RuntimeError as error:
            if self.engine.closed:
                raise unavailable() from error
            raise

    def start(self, requests: Sequence[Request]) -> Group:
        """Submit requests to the engine.

        Raises:
          ApiError: 429 if too many wait; 503 if the engine is closed.
        """
        try:
            with self._unavailable():
                return self.engine.start(requests)
        except QueueFull as error:
            raise _too_many(error) from None


def _too_many(error: QueueFull) -> ApiError:
    return ApiError(429, str(error), code="rate_limit_exceeded", headers={"Retry-After": "1"})


def unavailable() -> ApiError:
    """The error of all requests while the server shuts down."""
    return ApiError(503, "the server is shutting down: use another one", headers={"Retry-After": "1"})
