"""The programs that an engine runs on the device, each a function of flat weights and the state of the batch.

A program is called with flat leaves and not with modules, because calling a jitted function on an NNX module costs
milliseconds. It puts the modules together inside of its trace.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jspec.config import EngineConfig
from jspec.drafting.base import Drafter
from jspec.engine.compiling import Program, decode_options
from jspec.engine.state import DecodeState, admit, init_state, retire
from jspec.engine.step import DecodeStep
from jspec.models.params import DTYPES
from jspec.sampling.streams import RoundNoise
from jspec.sampling.verify import RULES

Leaves = tuple[list[jax.Array], list[jax.Array]]  # the arrays of the target, and those of the draft model
WEIGHTS_THEN_STATE, STATE = 1, 0  # what the arguments of a program begin with; as a number, the place of the state


@dataclasses.dataclass(frozen=True)
class StepBuilder:
    """Builds a ``DecodeStep`` from flat leaves, for the inside of a trace.

    Attributes:
      merge_target, merge_draft: put the leaves of the target, and of the draft model, together.
      make_drafter: builds the drafter around target and draft model; given a number of drafts as well, one that drafts
        so many.
      verify: the name of a verification rule.
      config: what may be used.
      noise: where the noise of a round comes from.
      most: K, the most drafts of a round: the drafter's own number.
    """

    merge_target: Callable[[Sequence[jax.Array]], Any]
    merge_draft: Callable[[Sequence[jax.Array]], Any]
    make_drafter: Callable[..., Drafter]
    verify: str
    config: EngineConfig
    noise: Callable[..., RoundNoise]
    most: int

    def width(self, K: int) -> int:
        """How many query tokens the target reads for each row in a round of K drafts."""
        return self.config.width or K + 1

    def step(self, leaves: Leaves, K: int) -> DecodeStep:
        """For rounds of K drafts. K = 0 keeps the drafter, which may have to make up later for what it missed."""
        target, draft_model = self.merge_target(leaves[0]), self.merge_draft(leaves[1])
        own = K in (0, self.most)
        drafter = self.make_drafter(target, draft_model) if own else self.make_drafter(target, draft_model, K)
        # Without drafts every rule is the target's own draw, and ``match`` makes it in one pass over the vocabulary.
        return DecodeStep(target, drafter, RULES[self.verify if K else "match"], self.width(K), self.noise)

    def rounds(self, leaves: Leaves, state: DecodeState, K: int) -> tuple[DecodeState, jax.Array]:
        """``config.rounds`` rounds of up to K drafts, and their logs, packed."""
        step = self.step(leaves, K)
        decode = step.decode_plainly if K == 0 < self.most else step.decode
        return decode(state, self.config.rounds)

    def prefill(self, leaves: Leaves, state: DecodeState, *chunk) -> tuple[DecodeState, None]:
        """``DecodeStep.prefill``."""
        return self.step(leaves, self.most).prefill(state, *chunk), None

    def catch_up(self, leaves: Leaves, state: DecodeState) -> tuple[DecodeState, None]:
        """The drafter makes up for what a round of the most drafts may have left it."""
        return self.step(leaves, self.most).catch_up(state, self.most + 1), None

    def empty_state(self, leaves: Leaves) -> DecodeState:
        """An empty batch; not for a trace."""
        step = self.step(leaves, self.most)
        return init_state(self.config, step.target, step.drafter, DTYPES[self.config.dtype])


class Programs:
    """Every program of an engine; each takes the state and returns it with something else, or with None.

    Attributes:
      prefill: (leaves, state, *chunk), ``DecodeStep.prefill``.
      admit: (state, row, prompt, request), ``state.admit``.
      retire: (state, rows), ``state.retire``.
      catch_up: (leaves, state), for the drafter before a smaller K.
      decode: K -> (leaves, state), rounds with up to K drafts; returns their logs, packed, beside the state.
    """

    def __init__(self, builder: StepBuilder, target_leaves: Sequence[jax.Array], draft_lengths: Sequence[int]):
        self.prefill = Program(builder.prefill, WEIGHTS_THEN_STATE)
        self.admit = Program(lambda *args: (admit(*args), None), STATE)
        self.retire = Program(lambda *args: (retire(*args), None), STATE)
        self.catch_up = Program(builder.catch_up, WEIGHTS_THEN_STATE)
        self.decode: dict[int, Program] = {}
        for K in draft_lengths:
            options = decode_options(target_leaves, builder.config.max_batch * builder.width(K))
            self.decode[K] = Program(functools.partial(builder.rounds, K=K), WEIGHTS_THEN_STATE, options)

    def __iter__(self) -> Iterator[Program]:
        return iter((self.prefill, self.admit, self.retire, self.catch_up, *self.decode.values()))
