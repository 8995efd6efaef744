"""Makes requests of prompts, and deltas and results of tokens."""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from jspec.config import ModelConfig
from jspec.engine.contradictions import NoTokenAllowed, contradiction, restrictions
from jspec.engine.request import FAILED, FINISH_REASONS, ActiveRequest, Progress, Request
from jspec.outputs import Delta, Logprob, Result, Stats
from jspec.sampling import processors
from jspec.sampling.logprobs import PACKED, TokenLogprobs
from jspec.sampling.params import SamplingParams
from jspec.text.detokenizer import Detokenizer, Tokenizer, encode
from jspec.text.grammar.grammars import Grammars
from jspec.text.prompts import Prompt, checked_ids, text_or_ids
from jspec.text.stop_strings import Completion
from jspec.text.thinking import budget_constraint
from jspec.text.token_bytes import TokenBytes


class Frontend:
    """Converts between text and tokens for the engine: it has the tokenizer and the vocabulary.

    Args:
      tokenizer: the target's tokenizer; None if its checkpoint has none.
      vocab_size: V of the target.
      eos_token_ids: the target's end-of-sequence tokens.
      method: the drafting method, for messages; None for plain decoding.
      reproducible: the value of ``Result.reproducible``.
      default_params: the defaults of a request without SamplingParams.
      max_len: the longest prompt plus completion, to which ``truncate_prompt_tokens=-1`` cuts prompts.
      num_draft_tokens: K, the most drafts of a round.
      longest_text: how many tokens a text may have for the drafter to draft after it; None if it has no limit.

    Attributes:
      grammars: compiles the grammars of requests with structured outputs.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        method: str | None = None,
        reproducible: bool = True,
        default_params: SamplingParams | None = None,
        max_len: int | None = None,
        num_draft_tokens: int = 0,
        longest_text: int | None = None,
    ):
        self._max_len, self._num_draft_tokens, self._longest_text = max_len, num_draft_tokens, longest_text
        self.tokenizer, self.default_params = tokenizer, default_params or SamplingParams()
        self._vocab_size, self._eos_token_ids = vocab_size, tuple(eos_token_ids)
        self._method, self._reproducible = method, reproducible
        self._warned_of_limit = False
        # The copies of a request have the same bad words, which are encoded once.
        self._encoded_bad_words = functools.lru_cache(maxsize=8)(self._bad_words)
        self.grammars = Grammars(tokenizer, vocab_size, eos_token_ids)

    def request(self, index: int, prompt: Prompt, params: SamplingParams, key_data: np.ndarray) -> Request:
        """The request of a prompt, whose number for messages is ``index``. Every request is made here.

        Raises:
          ValueError: the prompt or a parameter cannot be served.
        """
        if params.n != 1:
            raise ValueError(
                f"n={params.n}: a request has one completion here; jspec.generate() makes several, or ask for each of "
                "params.copies()"
            )
        tokens = self._truncated(
            self.tokens(f"prompt {index}", text_or_ids(index, prompt)), params.truncate_prompt_tokens
        )
        stop_tokens = params.stop_tokens(self._eos_token_ids)
        checked_ids(params.stop_token_ids, self._vocab_size, "stop_token_ids")
        bad_words = self._encoded_bad_words(params.bad_words)
        processors.check(params, self._vocab_size, bad_words, f"prompt {index}")
        completion = None
        if self.tokenizer is not None and params.detokenize:
            decode = functools.partial(self.tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
            completion = Completion(
                Detokenizer(decode, tokens),
                stop=tuple(params.stop),
                min_tokens=params.min_tokens,
                include_stop=params.include_stop_str_in_output,
            )
        elif params.stop:
            raise ValueError(f"stop={params.stop!r} is text, but the checkpoint has no tokenizer; use stop_token_ids")
        form = params.structured_outputs
        constraint = None if form is None else self.grammars.constraint(form, stop_tokens)
        if params.thinking_budget is not None:
            constraint = budget_constraint(params.thinking_budget, self.tokenizer, self._bytes_of, tokens, constraint)
        request = Request(
            index=index,
            prompt=tokens,
            params=params,
            key_data=key_data,
            stop_tokens=stop_tokens,
            watcher=completion,
            bad_words=bad_words,
            constraint=constraint,
        )
        if len(restrictions(params)) > 1 and (error := contradiction(request, (), self._vocab_size)) is not None:
            raise error
        return request

    def tokens(self, what: str, given: str | Sequence[int], *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text or of token ids; ``what`` it is, for messages.

        Raises:
          ValueError: it is neither, or has what the tokenizer or the vocabulary does not.
        """
        if isinstance(given, str):
            if self.tokenizer is None:
                raise ValueError(f"{what} is text, but the checkpoint has no tokenizer; pass token ids")
            given = encode(self.tokenizer, given, what, add_special_tokens=add_special_tokens)
        return checked_ids(given, self._vocab_size, what, "a string or ")

    def delta(self, progress: Progress) -> Delta:
        """What is new of a request, with text.

        Raises:
          Exception: of the tokenizer, unless the request has failed already.
        """
        active, token_ids, finished, start = progress
        completion = active.request.watcher
        result = self.result(active) if finished else None
        text = None
        if isinstance(completion, Completion):
            text = "" if active.outcome == FAILED else completion.take()
        end = start + len(token_ids)
        return Delta(
            id=active.order,
            token_ids=token_ids,
            text=text,
            finished=finished,
            result=result,
            sources=active.sources[start:end],
            logprobs=self._logprobs(active, start, end),
            prompt_logprobs=self._prompt_logprobs(active) if start == 0 and token_ids else None,
        )

    def result(self, active: ActiveRequest) -> Result:
        """The result of a request that has ended."""
        request, tokens = active.request, active.tokens
        finish_reason = FINISH_REASONS[active.outcome]
        text = stop_reason = None
        completion = request.watcher
        if isinstance(completion, Completion):
            if active.outcome == FAILED:  # perhaps because of the tokenizer, which is not called again
                text = completion.shown
            else:
                completion.end()
                text, stop_reason = completion.text, completion.stop
        if finish_reason == "stop" and stop_reason is None and tokens[-1] in request.params.stop_token_ids:
            stop_reason = tokens[-1]
        elif finish_reason == "error":
            stop_reason = f"the target's logits at position {len(request.prompt) + len(tokens)} are not finite"
            error = active.error or self._contradiction(active)
            if error is not None:
                stop_reason = f"{type(error).__name__}: {error}"
        # With ``max_drafts=0`` its rounds drafted nothing by request, not for lack of positions.
        limit = None if request.params.max_drafts == 0 else self._longest_text
        drafts = active.drafted, active.accepted, len(request.prompt), limit, active.deepest
        stats = Stats.of(self._num_draft_tokens, *drafts)
        self._warn_of_limit(request, stats)
        return Result(
            text=text,
            token_ids=tokens,
            prompt_token_ids=list(request.prompt),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            stats=stats,
            sources=active.sources,
            reproducible=self._reproducible and len(active.versions) < 2 and not active.redrafted,
            weights_versions=tuple(active.versions),
            num_cached_tokens=active.num_cached_tokens,
            logprobs=self._logprobs(active, 0, len(tokens)),
            prompt_logprobs=self._prompt_logprobs(active),
            token_logprobs=None if request.params.logprobs is None else chosen_logprobs(active.logprobs),
        )

    def _contradiction(self, active: ActiveRequest) -> NoTokenAllowed | None:
        """The error of options that allow no token where a request has ended; else it had no finite logits there."""
        if not restrictions(active.request.params):
            return None
        return contradiction(active.request, active.tokens, self._vocab_size)

    def _logprobs(self, active: ActiveRequest, start: int, end: int) -> list[dict[int, Logprob]] | None:
        """Log-probabilities of the new tokens from number ``start`` to before number ``end``."""
        count = active.request.params.logprobs
        if count is None:
            return None
        return self._described(active.tokens[start:end], active.logprobs[start:end], count)

    def _prompt_logprobs(self, active: ActiveRequest) -> list[dict[int, Logprob] | None] | None:
        """Log-probabilities of the prompt; None if they are not wanted, or if it was not prefilled to its end."""
        count, lines = active.request.params.prompt_logprobs, prompt_lines(active)
        if count is None or lines is None:
            return None
        return [None, *self._described(active.request.prompt[1:], lines, count)]

    def _described(self, tokens: Sequence[int], packed: Sequence[np.ndarray], count: int) -> list[dict[int, Logprob]]:
        """For each token its ``Logprob`` and those of the ``count`` likeliest, from lines of ``TokenLogprobs.packed``."""
        described = []
        for token, line in zip(tokens, packed, strict=True):
            logprobs = TokenLogprobs.unpacked(line)
            by_token = {token: Logprob(float(logprobs.chosen), int(logprobs.rank), self._decoded(token))}
            likeliest = zip(logprobs.tokens[:count].tolist(), logprobs.values[:count].tolist(), strict=True)
            for rank, (other, value) in enumerate(likeliest, 1):
                if other >= 0 and other != token:
                    by_token[other] = Logprob(value, rank, self._decoded(other))
            described.append(by_token)
        return described

    @functools.cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self.tokenizer)

    def _bytes_of(self, token: int) -> bytes:
        return self._token_bytes(token, self._decoded(token) or "")

    def _decoded(self, token: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode([token], skip_special_tokens=False)

    def _truncated(self, tokens: list[int], count: int | None) -> list[int]:
        """The last ``count`` tokens; -1 is as many as leave room for one new token."""
        if count == -1:
            count = None if self._max_len is None else self._max_len - 1
        return tokens if count is None else tokens[-count:]

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each bad word, as it stands and with a space in front."""
        if not words:
            return ()
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise ValueError(f"bad_words={words!r} is text, but the checkpoint has no tokenizer; use logit_bias")
        texts = dict.fromkeys(text for word in words for text in (word.lstrip(), f" {word.lstrip()}"))
        encoded = [encode(tokenizer, text, "bad_words", add_special_tokens=False) for text in texts]
        return tuple(dict.fromkeys(tuple(tokens) for tokens in encoded if tokens))

    def _warn_of_limit(self, request: Request, stats: Stats):
        if stats.num_steps_past_draft_limit and not self._warned_of_limit:
            self._warned_of_limit = True
            warnings.warn(
                f"the {self._method} drafter has no positions for texts of more than {self._longest_text} tokens: "
                f"{stats.num_steps_past_draft_limit} of {stats.num_steps} rounds of prompt {request.index} drafted nothing "
                "(stats.num_steps_past_draft_limit)",
                stacklevel=3,
            )


def prompt_lines(active: ActiveRequest) -> list[np.ndarray] | None:
    """A line of ``TokenLogprobs.packed`` for each token of a prompt but the first; None if it has not all of them."""
    if active.outcome == FAILED:  # a device that failed has lost them
        return None
    lines, count = {}, len(active.request.prompt)
    for start, (length, packed, place) in active.prompt_logprobs.items():
        lines |= dict(enumerate(np.asarray(packed)[place, :length], start + 1))
    return None if len(lines) < count - 1 else [lines[i] for i in range(1, count)]


def chosen_logprobs(lines: Sequence[np.ndarray]) -> np.ndarray:
    """The log-probability of each of n tokens, float32 ``[n]``, of their lines of ``TokenLogprobs.packed``."""
    packed = np.array(lines, np.int32).reshape(-1, PACKED)
    return TokenLogprobs.unpacked(packed).chosen.copy()  # the other numbers may go


def end_tokens(config: ModelConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The tokens that end a text: those of config.json and generation_config.json, and the tokenizer's own, as in vLLM. Some
    checkpoints name the token that ends a turn of a chat in tokenizer_config.json alone."""
    own: Any = getattr(tokenizer, "eos_token_id", None)
    missing = isinstance(own, int) and 0 <= own < config.vocab_size and own not in config.eos_token_ids
    return (*config.eos_token_ids, own) if missing else config.eos_token_ids
