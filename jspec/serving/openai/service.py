"""What a server serves, and what its operator has decided."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from jspec.engine.engine import QueueFull
from jspec.engine.request import Request
from jspec.llm import LLM
from jspec.sampling.params import SamplingParams
from jspec.serving.async_engine import AsyncEngine, Group
from jspec.serving.openai.errors import ApiError
from jspec.serving.openai.keys import Keys
from jspec.serving.openai.limits import Limits
from jspec.text import encode

# Variables that well-known chat templates have, and that a request may set. None of them names a file or code.
TEMPLATE_KWARGS = ("enable_thinking", "thinking", "reasoning_effort", "preserve_thinking")

T = TypeVar("T")


@dataclasses.dataclass
class Service:
    """A model with an engine over it, and the settings of a server.

    Attributes:
      engine: serves the requests.
      names: how clients may call the model; the first is what ``/v1/models`` lists first, and what a request without a
        name means.
      keys: who may ask.
      limits: how much one request may ask for.
      chat_template: a Jinja template in place of the checkpoint's; None takes that one.
      template_kwargs: variables of the template that ``chat_template_kwargs`` may set.
      priorities: whether requests may have a priority; else all are first come, first served.
      draining: whether the server is about to end, so that new requests are refused.
      in_flight: how many requests are being answered.
      created: when this was made, in seconds since 1970.
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
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

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

    def require_model(self, name: str | None) -> str:
        """The name under which a request asks for the model.

        Raises:
          ApiError: 404.
        """
        if name is None:
            return self.names[0]
        if name not in self.names:
            message = f"the model {name[:256]!r} does not exist here: expected one of {', '.join(self.names)}"
            raise ApiError(404, message, "model", "model_not_found")
        return name

    def encoded(self, text: str, param: str, special: bool = True, cut: bool = False) -> list[int]:
        """The tokens of a text.

        Args:
          text: what to encode.
          param: the field that it is in.
          special: whether the tokenizer adds its special tokens.
          cut: whether the prompt will be cut to its last tokens, so that any length will do.

        Raises:
          ApiError: 400; there is no tokenizer, it fails, or the text cannot be short enough.
        """
        tokenizer = self.llm.tokenizer
        if tokenizer is None:
            raise ApiError(400, f"{param} is text, but the model has no tokenizer: expected token ids", param)
        if not cut:
            self.require_short(len(text), param)
        try:
            return encode(tokenizer, text, param, add_special_tokens=special)
        except ValueError as error:
            raise ApiError(400, str(error), param) from None

    def require_short(self, characters: int, param: str):
        """Refuse a text that has more characters than ``max_len`` of the longest tokens, before it is encoded.

        Raises:
          ApiError: 400.
        """
        if characters > self.max_len * self._longest_token:
            message = (
                f"{param} has {characters} characters: expected what the model's context, {self.max_len} tokens, holds"
            )
            raise ApiError(400, message, param, "context_length_exceeded")

    @functools.cached_property
    def _longest_token(self) -> int:
        """Characters of the vocabulary's longest token."""
        tokenizer = self.llm.tokenizer
        return 1 if tokenizer is None else max(map(len, tokenizer.get_vocab()), default=1)

    def decoded(self, token_ids: Sequence[int], special: bool = True) -> str:
        """The text of tokens, special tokens included unless ``special`` is False."""
        tokenizer = self.llm.tokenizer
        return "" if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=not special)

    def require_context(self, token_ids: Sequence[int], param: str):
        """Refuse a prompt without tokens, or one that leaves no room for a new token.

        Raises:
          ApiError: 400.
        """
        if not token_ids:
            raise ApiError(400, f"{param} is empty: expected at least one token", param)
        if len(token_ids) >= self.max_len:
            count, most = len(token_ids), self.max_len - 1
            message = f"{param} has {count} tokens: expected at most {most}, and one more for the completion"
            raise ApiError(400, message, param, "context_length_exceeded")

    def requests(
        self, prompt: Sequence[int], params: Sequence[SamplingParams], priority: int = 0, salt: str = ""
    ) -> list[Request]:
        """Requests for completions of one prompt, which the engine can serve.

        Raises:
          ValueError: it cannot; the message begins with the name of a field of ``SamplingParams``, or with the prompt.
        """
        return [self.llm.engine.request(prompt, p, priority=priority, salt=salt) for p in params]

    def require_room(self):
        """Refuse a request as soon as it comes, if it could not wait.

        Raises:
          ApiError: 429.
        """
        try:
            self.llm.engine.require_room()
        except QueueFull as error:
            raise _too_many(error) from None

    async def prepare(self, work: Callable[[], T]) -> T:
        """The result of ``work``, which takes too long for the event loop; another thread does it.

        Raises:
          ApiError: 503; the engine is closed.
          Exception: what ``work`` raised.
        """
        try:
            return await self.engine.prepare(work)
        except RuntimeError as error:
            if self.engine.closed:
                raise unavailable() from error
            raise

    def start(self, requests: Sequence[Request]) -> Group:
        """Have requests served.

        Raises:
          ApiError: 429 if too many wait; 503 if the engine is closed.
        """
        try:
            return self.engine.start(requests)
        except QueueFull as error:
            raise _too_many(error) from None
        except RuntimeError as error:
            if self.engine.closed:
                raise unavailable() from error
            raise


def _too_many(error: QueueFull) -> ApiError:
    return ApiError(429, str(error), code="rate_limit_exceeded", headers={"Retry-After": "1"})


def unavailable() -> ApiError:
    """What clients are told while the server ends."""
    return ApiError(503, "the server is shutting down: ask another one", headers={"Retry-After": "1"})
