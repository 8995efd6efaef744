"""The state of one completion in its thinking budget: where the marker that ends reasoning has to come."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jspec.sampling.thinking import ThinkingBudget
from jspec.text.detokenizer import Tokenizer, encode

PROMPT_END = 256  # tokens of the prompt among which its last marker is looked for


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
      tail: the newest tokens, in which markers are found.
    """

    thinking: bool
    used: int = 0
    forced: int = 0
    tail: tuple[int, ...] = ()


class BudgetConstraint:
    """Asks for the end marker where the budget is spent; an ``engine.request.Constraint``.

    Args:
      start, end: the tokens of the markers.
      most: the most tokens of reasoning.
      begun: whether the completion begins with reasoning.
      inner: another constraint of the request, which has to allow the marker within reasoning.
    """

    def __init__(self, start: Sequence[int], end: Sequence[int], most: int, begun: bool, inner: Inner | None = None):
        self._start, self._end, self._most, self._inner = tuple(start), tuple(end), most, inner
        self._state = _State(begun)
        self._longest = max(len(self._start), len(self._end))

    def jump_forward(self, most: int) -> list[int]:
        """The rest of the marker where it has to come, else the inner constraint's tokens."""
        if self._due(self._state) is not None:
            return list(self._end[self._state.forced :][:most])
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
        """The token of the marker that has to come next; None if others may."""
        return self._end[state.forced] if state.thinking and state.used >= self._most else None

    def _after(self, state: _State, token: int) -> _State:
        tail = (*state.tail, token)[-self._longest :]
        if not state.thinking:
            return _State(tail[-len(self._start) :] == self._start, state.used, 0, tail)
        if state.used >= self._most:
            done = state.forced + 1 == len(self._end)
            return _State(not done, state.used, 0 if done else state.forced + 1, tail)
        return _State(tail[-len(self._end) :] != self._end, state.used + 1, 0, tail)


def budget_constraint(
    budget: ThinkingBudget, tokenizer: Tokenizer | None, prompt: Sequence[int], inner: Any = None
) -> BudgetConstraint:
    """The constraint of a request behind a prompt.

    Raises:
      ValueError: there is no tokenizer, or it makes no tokens of a marker.
    """
    if tokenizer is None:
        raise ValueError("thinking_budget needs a tokenizer, and the checkpoint has none")
    start, end = (
        encode(tokenizer, text, "thinking_budget", add_special_tokens=False) for text in (budget.start, budget.end)
    )
    if not start or not end:
        raise ValueError(f"thinking_budget={budget!r}: expected markers of which the tokenizer makes tokens")
    begun = budget.begun
    if begun is None:
        text = tokenizer.decode(list(prompt[-PROMPT_END:]), skip_special_tokens=False)
        begun = text.rfind(budget.start) > text.rfind(budget.end)
    return BudgetConstraint(start, end, budget.tokens, begun, inner)
