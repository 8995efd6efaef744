"""Requests with a thinking budget: the marker comes where the budget is spent, and all else is as the target has it."""

import dataclasses

from disturbances import attribute

from jspec.sampling.thinking import ThinkingBudget
from jspec.text.thinking import BudgetConstraint
from lossless import served
from lossless.checks import FIRST, p_values
from lossless.distributions import Grammar, History, Options, Warp
from lossless.losslessness import Run, ServedLosslessness, engine_of
from lossless.statistics import LEVEL
from lossless.steps import Ask, Program
from lossless.table_model import V

PENALTIES = {"repetition_penalty": 1.6, "frequency_penalty": 0.5}
LETTERS = "abcd"  # of tokens
QUICK, LONG = 4_000, 100_000


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


ASKS = (
    Ask((1,), Warp(), options=Options(grammar=budget((0, 2), (3,), 2, True))),
    Ask((2, 0, 1, 3, 1), Warp(1.3), options=Options(grammar=budget((1,), (2, 3), 1, False))),
    Ask((2, 0, 1), Warp(0.8), options=Options(grammar=budget((1,), (3,), 1, True), **PENALTIES)),
    Ask((2, 0, 3, 3, 1, 0, 2), Warp(0.8)),
)
PROGRAMS = (
    (Program("rejection", draft_positions=served.SLOTS, slots=served.SLOTS), False),
    (Program("block", draft_positions=9, draft_tokens=(3, 0, 2), slots=served.SLOTS), True),
    (Program("match", draft_sampling="coupled", draft_positions=served.SLOTS, slots=served.SLOTS), False),
    (Program("rejection", "ngram", slots=served.SLOTS), False),
    (Program("match", "none", slots=served.SLOTS), False),
)


class TestServed(ServedLosslessness):
    asks, seed = ASKS, 95
    runs = (
        Run(PROGRAMS[0][0], QUICK, reproducible=True),
        *(Run(program, samples, "long", exact) for samples in (QUICK, LONG) for program, exact in PROGRAMS),
    )


def test_a_budget_that_is_counted_by_rounds_is_detected():
    """The marker comes at the first position of a round alone, as where a server looks at the text between rounds."""
    allow = BudgetConstraint.allow

    def at_rounds(self, drafts, flags):
        allow(self, [], flags)

    program = PROGRAMS[0][0]  # whose engine is there: the fault is in no program
    with attribute(BudgetConstraint, "allow", at_rounds):
        tallies = served.play(engine_of(program, True), 6_000, seed=96, asks=ASKS)
    assert min(p_values(TestServed.with_oracles(program, tallies)[:2], FIRST)) < LEVEL
