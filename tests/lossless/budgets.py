"""Thinking budgets as automata, which are the oracles of the engine's own constraint."""

import dataclasses

from jspec.sampling.thinking import ThinkingBudget
from jspec.text.thinking import BudgetConstraint
from lossless.distributions import Grammar, History
from lossless.table_model import V

LETTERS = "abcd"  # of tokens


def bytes_of(token: int) -> bytes:
    return LETTERS[token].encode()


@dataclasses.dataclass(frozen=True)
class Budget(Grammar):
    """A thinking budget as an automaton, and the engine's constraint of the same."""

    start: History = ()
    end: History = ()
    most: int = 0
    begun: bool = False

    def constraint(self) -> BudgetConstraint:
        start, end = ("".join(LETTERS[token] for token in marker) for marker in (self.start, self.end))
        return BudgetConstraint(ThinkingBudget(self.most, start, end), self.end, bytes_of, self.begun)


def budget(start: History, end: History, most: int, begun: bool) -> Budget:
    """The automaton, from the definition: the state is how the text so far is divided."""

    def read(text: History) -> tuple:
        """(thinking, tokens of reasoning, forced tokens, the newest tokens) after a text."""
        thinking, used, forced, tail = begun, 0, 0, ()
        for token in text:
            tail = (*tail, token)[-max(len(start), len(end)) :]
            if thinking and used >= most:
                forced += 1
                thinking, forced = (False, 0) if forced == len(end) else (True, forced)
            elif thinking:
                used, thinking = used + 1, tail[-len(end) :] != end
            else:
                thinking = tail[-len(start) :] == start
        return thinking, used, forced, tail

    numbers, texts, following, jumps = {read(()): 0}, [()], [], []
    for text in texts:  # which grows
        thinking, used, forced, _ = read(text)
        due = end[forced] if thinking and used >= most else -1
        row = []
        for token in range(V):
            if due not in (-1, token):
                row.append(-1)
                continue
            state = read((*text, token))
            if state not in numbers:
                numbers[state] = len(texts)
                texts.append((*text, token))
            row.append(numbers[state])
        following.append(tuple(row))
        jumps.append(due)
    return Budget(tuple(following), tuple(jumps), start, end, most, begun)
