"""The state of one completion in its thinking budget: where the marker that ends reasoning has to come."""

import codecs
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jspec.sampling.thinking import ThinkingBudget
from jspec.text.detokenizer import Tokenizer, encode

PROMPT_END = 256  # tokens of the prompt among which its last marker is looked for
MISSING = 3  # bytes that a character may lack, and so the most tokens that complete it


class Inner(Protocol):
    """Another constraint of the same request; see ``engine.request.Constraint``."""

    def jump_forward(self, most: int) -> Sequence[int]: ...

    def allow(self, drafts: Sequence[int], flags: np.ndarray): ...

    def add(self, tokens: Sequence[int]) -> int | None: ...


class _State(NamedTuple):
    """Where a completion is.

    Attributes:
      thinking: whether the next token is reasoning, or of the marker that ends it.
      used: how many tokens of reasoning there have been.
      forced: how many tokens of the marker have come because they had to.
      tail: the newest bytes, which may be the beginning of a marker or of a character.
      whole: whether the text does not end within a character.
    """

    thinking: bool
    used: int = 0
    forced: int = 0
    tail: bytes = b""
    whole: bool = True


class BudgetConstraint:
    """Asks for the end marker where the budget is spent; an ``engine.request.Constraint``.

    Args:
      budget: the most tokens of reasoning, and the markers.
      ending: the tokens of the end marker, when it has to come.
      bytes_of: gives the bytes of a token, in which markers are found however a model splits them.
      begun: whether the completion begins with reasoning.
      inner: another constraint of the request, which has to allow the marker within reasoning.
    """

    def __init__(
        self,
        budget: ThinkingBudget,
        ending: Sequence[int],
        bytes_of: Callable[[int], bytes],
        begun: bool,
        inner: Inner | None = None,
    ):
        self._most, self._ending, self._bytes_of, self._inner = budget.tokens, tuple(ending), bytes_of, inner
        self._start, self._end = budget.start.encode(), budget.end.encode()
        self._state = _State(begun)

    def jump_forward(self, most: int) -> list[int]:
        """The rest of the marker where it has to come, else the inner constraint's tokens."""
        if self._due(self._state) is not None:
            return list(self._ending[self._state.forced :][:most])
        return [] if self._inner is None else list(self._inner.jump_forward(most))

    def allow(self, drafts: Sequence[int], flags: np.ndarray):
        """Clear the flags of all other tokens where one of the marker has to come."""
        if self._inner is not None:
            self._inner.allow(drafts, flags)
        state = self._state
        for place, draft in enumerate([*drafts, None]):
            due = self._due(state)
            if due is not None:
                allowed = flags[place, due // 32] & (np.uint32(1) << np.uint32(due % 32))
                flags[place] = 0
                flags[place, due // 32] = allowed
            if draft is None or not flags[place, draft // 32] >> np.uint32(draft % 32) & 1:
                return
            state = self._after(state, draft)

    def add(self, tokens: Sequence[int]) -> int | None:
        """Advance by tokens of the completion."""
        for token in tokens:
            self._state = self._after(self._state, token)
        return None if self._inner is None else self._inner.add(tokens)

    def _due(self, state: _State) -> int | None:
        """The token of the marker that has to come next; None if others may, to complete a character among them. Text
        that no other constraint keeps valid has no more than ``MISSING`` tokens for that."""
        if not state.thinking or state.used < self._most:
            return None
        waits = not state.whole and (self._inner is not None or state.used < self._most + MISSING)
        return None if waits else self._ending[state.forced]

    def _after(self, state: _State, token: int) -> _State:
        if self._due(state) is not None:
            done = state.forced + 1 == len(self._ending)
            return _State(False, state.used) if done else state._replace(forced=state.forced + 1)
        marker, used = (self._end, state.used + 1) if state.thinking else (self._start, state.used)
        text = state.tail + self._bytes_of(token)
        if marker in text:
            return _State(not state.thinking, used)
        whole = codecs.utf_8_decode(text, "replace")[1] == len(text)
        return _State(state.thinking, used, 0, text[max(len(text) - max(len(marker) - 1, MISSING), 0) :], whole)


def budget_constraint(
    budget: ThinkingBudget,
    tokenizer: Tokenizer | None,
    bytes_of: Callable[[int], bytes],
    prompt: Sequence[int],
    inner: Inner | None = None,
) -> BudgetConstraint:
    """The constraint of a request behind a prompt.

    Raises:
      ValueError: there is no tokenizer, or it makes no tokens of the end marker.
    """
    if tokenizer is None:
        raise ValueError("thinking_budget needs a tokenizer, and the checkpoint has none")
    ending = encode(tokenizer, budget.end, "thinking_budget", add_special_tokens=False)
    if not ending:
        raise ValueError(f"thinking_budget.end={budget.end!r}: expected a text of which the tokenizer makes tokens")
    begun = budget.begun
    if begun is None:
        text = tokenizer.decode(list(prompt[-PROMPT_END:]), skip_special_tokens=False)
        begun = text.rfind(budget.start) > text.rfind(budget.end)
    return BudgetConstraint(budget, ending, bytes_of, begun, inner)
