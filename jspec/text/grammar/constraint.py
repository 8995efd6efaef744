"""The state of one completion in its grammar: allowed and jump-forward tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jspec.sampling.processors import num_words
from jspec.text.grammar.matcher import error_of, forced_tokens

NOT_ALLOWED = "doesn't satisfy the grammar"  # is in what llguidance says of a token that may not come


class GrammarDeadEnd(RuntimeError):
    """The grammar of a request has a branch that no text can complete, or one that takes llguidance too long, and a text or
    its drafts have come there. Only small parts of a grammar are looked at before."""


class GrammarConstraint:
    """The state of one completion in its grammar; an ``engine.request.Constraint``.

    Args:
      matcher: llguidance's, at the beginning.
      tokens: llguidance's view of the tokenizer, which knows at least V tokens.
      vocab_size: V of the target.
      stop_tokens: the tokens that end the request.
    """

    def __init__(self, matcher: Any, tokens: Any, vocab_size: int, stop_tokens: Sequence[int]):
        self._matcher, self._tokens = matcher, tokens
        self._vocab_size, self._stop_tokens = vocab_size, frozenset(stop_tokens)
        self._flags = np.zeros((1, num_words(tokens.vocab_size)), np.int32)
        self._count, self._ended = 0, False
        self._newest: list[int] = []  # tokens of the text
        self._ahead: Sequence[int] = ()  # the known jump-forward tokens

    def jump_forward(self, most: int) -> list[int]:
        """The jump-forward tokens, at most ``most``: those of the text that has to come next, as the tokenizer splits it."""
        if len(self._ahead) < most:
            self._ahead = self._forced_tokens()  # perhaps there are more
        tokens = [*self._ahead[:most]]
        if not tokens and self._matcher.is_stopped() and self._stop_tokens:
            tokens = [token for token in self._allowed() if token in self._stop_tokens][:most]
        return [token for token in tokens if token < self._vocab_size]

    def allow(self, drafts: Sequence[int], flags: np.ndarray):
        """Set the flags of the allowed tokens at each position up to the first draft that is not allowed."""
        advanced, size, ahead = 0, flags.shape[1], self._ahead
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
            del self._newest[len(self._newest) - advanced :]
            self._ahead = ahead
            if advanced and not self._matcher.rollback(advanced):
                raise GrammarDeadEnd(f"structured_outputs cannot be followed: {error_of(self._matcher)}")

    def add(self, tokens: Sequence[int]) -> int | None:
        """Advance by tokens of the completion. Returns how many to keep if it ends with them, else None."""
        for token in tokens:
            if self._ended:
                break
            self._count += 1
            if token in self._stop_tokens:
                self._ended = True
                continue
            self._consume(token)
            self._ended = self._complete()
        del self._newest[:-1]  # those before cannot be taken back any more
        return self._count if self._ended else None

    def _complete(self) -> bool:
        """Whether the text ends here without a stop token, because nothing can follow."""
        return self._matcher.is_stopped() and not (
            self._stop_tokens and any(token in self._stop_tokens for token in self._allowed())
        )

    def _allowed(self) -> list[int]:
        """The allowed tokens; used where they are few."""
        self._fill()
        bits = np.unpackbits(self._flags.view(np.uint8), bitorder="little")
        return np.flatnonzero(bits).tolist()

    def _fill(self):
        """Set the flags of the allowed tokens: only one if there is a jump-forward token."""
        self._ahead = self._ahead or self._forced_tokens()
        if self._ahead:
            self._flags[:] = 0
            self._flags.view(np.uint32)[0, self._ahead[0] // 32] = np.uint32(1) << np.uint32(self._ahead[0] % 32)
            return
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._flags, 0)
        if self._matcher.is_error():
            raise GrammarDeadEnd(f"structured_outputs cannot be followed: {error_of(self._matcher)}")

    def _forced_tokens(self) -> Sequence[int]:
        """The jump-forward tokens that one call finds."""
        return forced_tokens(self._tokens, self._matcher, self._newest)

    def _consume(self, token: int):
        if not self._matcher.consume_token(token):
            why = error_of(self._matcher)
            if NOT_ALLOWED not in why:  # the grammar exceeds llguidance's limits there
                raise GrammarDeadEnd(f"structured_outputs cannot be followed: {why}")
            raise RuntimeError(f"the grammar does not allow token {token}: {why}")
        self._newest.append(token)
        self._ahead = self._ahead[1:] if self._ahead and self._ahead[0] == token else ()
