"""Texts while everything happens that may happen around a request, against the same texts alone: tokens, and the bits of
their log-probabilities."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from disturbances import calls_of_any_length, preempting, serve

from jspec.doctor.exact import Way, Written, compared
from jspec.engine.engine import Engine
from jspec.engine.request import ActiveRequest, Request

PLAIN = Way("mixed at random", promised=True)
MORE = (3, 1, 4)  # tokens that a second turn adds: pages of the first are found to their last slots


@dataclasses.dataclass
class Difference:
    """What differs between answers and those that were expected.

    Attributes:
      requests: those whose answers differ, the text or a bit of a log-probability.
      texts, of_texts: how many texts are others, and of how many.
      bits, of_numbers: how many bits differ, and of how many log-probabilities that stand behind the same text.
    """

    requests: list[Request] = dataclasses.field(default_factory=list)
    texts: int = 0
    of_texts: int = 0
    bits: int = 0
    of_numbers: int = 0

    def __str__(self) -> str:
        return (
            f"{self.texts} of {self.of_texts} texts and {self.bits} bits of {self.of_numbers} log-probabilities differ"
        )

    def count(self, request: Request, expected: Written, found: Written):
        """Compare the answers of a request. One of both may have no log-probabilities, and then none are compared."""
        if not (expected.numbers and found.numbers):
            expected, found = expected._replace(numbers=()), found._replace(numbers=())
        one = compared(PLAIN, [expected], [found])
        self.requests += [] if one.none else [request]
        for name in ("texts", "of_texts", "bits", "of_numbers"):
            setattr(self, name, getattr(self, name) + getattr(one, name))


def written(active: ActiveRequest) -> Written:
    """The answer of a request; its log-probabilities are empty if it asked for none."""
    bits = [line[0] for line in active.logprobs[: len(active.tokens)]]
    return Written(active.tokens, np.array(bits, np.int32).view(np.float32).tolist())


def alone(engine: Engine, some: Sequence[Request]) -> dict[int, Written]:
    """The answers of an engine that plainly decodes one request after another, by their indices."""
    return {active.request.index: written(active) for active in engine.run(some)}


def mixed(engine: Engine, some: Sequence[Request], seed: int, silent: float = 0.0) -> dict[int, Written]:
    """The answers in groups of any size and order: some are preempted, some calls are short, some requests come while
    others decode.

    Args:
      engine: an engine with nothing else to do.
      some: the requests.
      seed: of the groups.
      silent: the share of groups whose requests ask for no log-probabilities, and thus have other programs.
    """
    rng = np.random.default_rng(seed)
    order, found = [some[i] for i in rng.permutation(len(some))], {}
    while order:
        group, order = order[: (size := int(rng.integers(1, 12)))], order[size:]
        if rng.random() < silent:
            group = [dataclasses.replace(one, params=dataclasses.replace(one.params, logprobs=None)) for one in group]
        with _disturbed(engine, rng, seed):
            together = None if rng.random() < 0.5 else int(rng.integers(1, 5))
            ended = engine.run(group) if together is None else serve(engine, group, at_a_time=together)
            found |= {active.request.index: written(active) for active in ended}
    return found


@contextlib.contextmanager
def _disturbed(engine: Engine, rng: np.random.Generator, seed: int) -> Iterator[None]:
    with preempting(engine, share=0.2) if rng.random() < 0.5 else calls_of_any_length(engine, seed):
        yield


def second_turns(first: Sequence[Request], answers: dict[int, Written], longest: int) -> list[Request]:
    """Requests that go on with the answers of others."""
    texts = {one.index: [*one.prompt, *answers[one.index].tokens, *MORE] for one in first}
    return [dataclasses.replace(one, prompt=texts[one.index][:longest]) for one in first]
