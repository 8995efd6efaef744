"""Grammars that restrict completions, with llguidance: which tokens may come next, and which ones have to."""

import functools
import importlib.util
import json
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from jspec.sampling.processors import num_words
from jspec.sampling.structured import StructuredOutputsParams
from jspec.text import Tokenizer

KEPT_GRAMMARS = 64  # compiled, for requests that ask for the same
MAX_GRAMMAR_BYTES = 2**20
MISSING = "structured_outputs needs llguidance: pip install 'jspec[structured]'"


@functools.cache
def available() -> bool:
    """Whether llguidance is installed, so that requests may have structured outputs."""
    return importlib.util.find_spec("llguidance") is not None


class Grammars:
    """Makes the constraints of requests.

    Any thread may ask. What takes long is done once: the tokenizer is read with the first request, and a grammar is compiled
    with the first request that has it.

    Args:
      tokenizer: the target's, of the ``tokenizers`` library.
      vocab_size: V of the target.
      eos_token_ids: the tokens that end a text.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]):
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, list(eos_token_ids)
        self._lock = threading.Lock()
        self._compiled = functools.lru_cache(maxsize=KEPT_GRAMMARS)(self._compile)

    def constraint(self, asked: StructuredOutputsParams, stop_tokens: Sequence[int]) -> "GrammarConstraint":
        """The constraint of one request, at the beginning of its completion.

        Args:
          asked: the form of the completion.
          stop_tokens: the tokens that end the request.

        Raises:
          ValueError: llguidance is not installed, there is no tokenizer that it reads, or the grammar is no grammar.
        """
        if not available():
            raise ValueError(MISSING)
        with self._lock:  # a grammar that several ask for at the same time is compiled once
            matcher = self._compiled(asked).deep_copy()
        return GrammarConstraint(matcher, self._vocab_size, self._tokens.vocab_size, stop_tokens)

    @functools.cached_property
    def _tokens(self) -> Any:
        """llguidance's view of the tokenizer, which knows the bytes of every token."""
        import llguidance.hf

        if self._tokenizer is None:
            raise ValueError("structured_outputs needs a tokenizer, and the checkpoint has none")
        ends = self._eos_token_ids or [getattr(self._tokenizer, "eos_token_id", None)]
        if ends == [None]:
            raise ValueError("structured_outputs: the checkpoint names no token that ends a text (eos_token_id)")
        most = max(self._vocab_size, max(self._tokenizer.get_vocab().values(), default=0) + 1)
        try:
            return llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=most, eos_token=ends)  # type: ignore[arg-type]
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic of the Rust code is no Exception
            raise ValueError(
                f"structured_outputs: llguidance cannot read the checkpoint's tokenizer ({type(error).__name__}: {error})"
            ) from None

    def _compile(self, asked: StructuredOutputsParams) -> Any:
        """The matcher of a grammar, at its beginning."""
        from llguidance import LLMatcher, LLParserLimits

        tokens = self._tokens  # what is wrong with the tokenizer is not the grammar's fault
        try:
            text = _grammar(asked)
            if len(text) > MAX_GRAMMAR_BYTES:
                raise ValueError(f"it has {len(text)} bytes: expected at most {MAX_GRAMMAR_BYTES}")
            matcher = LLMatcher(tokens, text, log_level=0, limits=LLParserLimits(verbose_errors=False))
            if matcher.is_error():
                raise ValueError(_error(matcher))
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:
            raise ValueError(f"structured_outputs has no usable grammar: {error}") from None
        return matcher


class GrammarConstraint:
    """How far one completion has come in its grammar; an ``engine.request.Constraint``.

    Args:
      matcher: llguidance's, at the beginning.
      vocab_size: V of the target.
      num_tokens: how many tokens llguidance knows, at least V.
      stop_tokens: the tokens that end the request.
    """

    def __init__(self, matcher: Any, vocab_size: int, num_tokens: int, stop_tokens: Sequence[int]):
        self._matcher, self._vocab_size, self._stop_tokens = matcher, vocab_size, frozenset(stop_tokens)
        self._flags = np.zeros((1, num_words(num_tokens)), np.int32)
        self._count, self._ended = 0, False

    def forced(self, most: int) -> list[int]:
        """The tokens of the text that has to come next, as the tokenizer splits it."""
        tokens = self._matcher.compute_ff_tokens()[:most]
        if not tokens and self._matcher.is_stopped() and self._stop_tokens:
            tokens = [token for token in self._allowed() if token in self._stop_tokens][:most]
        return [token for token in tokens if token < self._vocab_size]

    def allow(self, drafts: Sequence[int], flags: np.ndarray):
        """Take out the tokens that cannot come, at each position up to the first draft that cannot."""
        advanced, size = 0, flags.shape[1]
        try:
            for place, draft in enumerate([*drafts, None]):
                self._fill()
                flags[place] = self._flags[0, :size].view(np.uint32)
                if draft is None or not flags[place, draft // 32] >> np.uint32(draft % 32) & 1:
                    return
                if draft in self._stop_tokens:  # whatever is behind it is not emitted
                    return
                self._consume(draft)
                advanced += 1
                if self._complete():
                    return
        finally:
            if advanced and not self._matcher.rollback(advanced):
                raise RuntimeError(f"llguidance cannot go back: {_error(self._matcher)}")

    def add(self, tokens: Sequence[int]) -> int | None:
        """Go on with tokens of the completion. Returns how many to keep if it ends with them, else None."""
        for token in tokens:
            if self._ended:
                break
            self._count += 1
            if token in self._stop_tokens:
                self._ended = True
                continue
            self._consume(token)
            self._ended = self._complete()
        return self._count if self._ended else None

    def _complete(self) -> bool:
        """Whether the text ends here without a token that says so: nothing can follow, and no stop token is expected."""
        return self._matcher.is_stopped() and not (
            self._stop_tokens and any(token in self._stop_tokens for token in self._allowed())
        )

    def _allowed(self) -> list[int]:
        """The tokens that may come next, where few may."""
        self._fill()
        bits = np.unpackbits(self._flags.view(np.uint8), bitorder="little")
        return np.flatnonzero(bits).tolist()

    def _fill(self):
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._flags, 0)
        if self._matcher.is_error():
            raise RuntimeError(f"the grammar cannot be followed: {_error(self._matcher)}")

    def _consume(self, token: int):
        if not self._matcher.consume_token(token):
            raise RuntimeError(f"the grammar does not allow token {token}: {_error(self._matcher)}")


def _error(matcher: Any) -> str:
    """What llguidance says about its matcher, in one line."""
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())


def _grammar(asked: StructuredOutputsParams) -> str:
    """What llguidance calls a grammar."""
    from llguidance import LLMatcher

    if asked.json is not None or asked.json_object:
        options: dict[str, Any] = {}
        if asked.whitespace_pattern is not None:
            options["whitespace_pattern"] = asked.whitespace_pattern
        elif asked.disable_any_whitespace:
            options["whitespace_flexible"] = False
        schema = asked.json if asked.json is not None else json.dumps({"type": "object"})
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]
    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(asked.regex)
    if asked.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in asked.choice))
    assert asked.grammar is not None
    return LLMatcher.grammar_from_lark(asked.grammar)
