"""The most tokens of a completion that are reasoning."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jspec._validation import LARGEST_INT, is_int, is_one_of, require, require_characters


@dataclasses.dataclass(frozen=True)
class ThinkingBudget:
    """How much a model may reason. When the tokens are spent, the marker that ends the reasoning has to come.

    The reasoning begins with the completion if the prompt has opened it, and else behind ``start``. Drafts are verified
    under the budget as the target's tokens are, so the marker comes at its place also in the middle of a round.

    Args:
      tokens: the most tokens of reasoning, without the markers.
      start, end: the markers. They are found in the text, however the model splits it into tokens.
      begun: whether the prompt has opened the reasoning; None looks for the markers at its end.

    Raises:
      ValueError: a value that cannot be used.

    Example::

        params = jspec.SamplingParams(thinking_budget=jspec.ThinkingBudget(512))
    """

    tokens: int
    start: str = "<think>"
    end: str = "</think>"
    begun: bool | None = None

    def __post_init__(self):
        ok = is_int(self.tokens) and 0 <= self.tokens <= LARGEST_INT
        require(ok, "thinking_budget", self.tokens, "an integer of at least 0 and below 2^31")
        for name in ("start", "end"):
            value = getattr(self, name)
            require(isinstance(value, str) and value != "", name, value, "a string that is not empty")
            require_characters(name, value)
        require(is_one_of(self.begun, (None, True, False)), "begun", self.begun, "True, False or None")

    @staticmethod
    def of(value: Any) -> "ThinkingBudget | None":
        """This budget itself, one of a number of tokens or of fields by name, or None.

        Raises:
          ValueError: it is something else.
        """
        if value is None or isinstance(value, ThinkingBudget):
            return value
        if is_int(value):
            return ThinkingBudget(value)
        known = [field.name for field in dataclasses.fields(ThinkingBudget)]
        expected = f"a number of tokens, ThinkingBudget, or a dictionary of its fields {', '.join(known)}"
        ok = isinstance(value, Mapping) and "tokens" in value and all(name in known for name in value)
        require(ok, "thinking_budget", value, expected)
        return ThinkingBudget(**value)
