"""Whole steps whose K changes from round to round: every row has a controller of its own, as an engine of one row
has."""

import copy
import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec.engine.adaptive.controller import Controller
from jspec.engine.round_log import RoundLog
from jspec.engine.runner.state import STOPPED, DecodeState
from jspec.engine.runner.step import DecodeStep
from jspec.sampling.verify import RULES
from lossless.rounds import deal
from lossless.statistics import count_pairs
from lossless.steps import ASKS, CONFIG, Ask, K, N, Program, S, V, _code, prefilled


@dataclasses.dataclass(frozen=True)
class Adapted:
    """What happened to all requests of one kind.

    Attributes:
      texts: int ``[V + 1] * N``, completions; V stands for what follows a stop token.
      rounds: int ``[(V + 1) ** N, K + 1, K + 1, K + 1]``, rounds by completion so far, K chosen, drafted, accepted.
      changes: rounds whose K was not that of the row's round before.
    """

    texts: np.ndarray
    rounds: np.ndarray
    changes: int


class Controllers:
    """One controller per history of (K, accepted): rows that have seen the same share it.

    Attributes:
      chosen: int ``[histories]``, the K that each chooses next.
    """

    def __init__(self, seconds: Mapping[int, float]):
        self._all, self._after = [Controller({1: seconds})], {}
        self.chosen = np.array([self._all[0].choose(1)])

    def after(self, history, accepted) -> np.ndarray:
        """The history of each row, ``[B]``, after a round that accepted so many, ``[B]``."""
        steps, row = np.unique(np.stack([history, accepted]), axis=1, return_inverse=True)
        return np.array([self._next(*step) for step in steps.T.tolist()])[row.ravel()]

    def _next(self, history: int, accepted: int) -> int:
        if (history, accepted) not in self._after:
            controller = copy.deepcopy(self._all[history])
            controller.observe(int(self.chosen[history]), 1, [accepted])
            self._after[history, accepted] = len(self._all)
            self._all.append(controller)
            self.chosen = np.append(self.chosen, controller.choose(1))
        return self._after[history, accepted]


def play_adaptively(
    program: Program, tables, samples: int, seed: int, seconds: Mapping[int, float], asks: Sequence[Ask] = ASKS
) -> list[Adapted]:
    """Play at least ``samples`` texts of every kind of request that has a full share.

    ``seconds`` is how long a round of each K takes, which the controllers choose by."""
    which, full = deal(asks, CONFIG.max_batch)
    start, controllers = prefilled(program, [asks[i] for i in which], tables), Controllers(seconds)
    begin = np.array([len(ask.prompt) for ask in asks])[which]
    shape = ((V + 1) ** N, *[K + 1] * 3)
    texts, rounds = np.zeros((len(asks), shape[0]), int), np.zeros((len(asks), np.prod(shape)), int)
    changes = np.zeros(len(asks), int)
    for i in range(-(-samples // full)):
        key_data = jax.random.key_data(jax.random.split(jax.random.fold_in(jax.random.key(seed), i), len(which)))
        state = dataclasses.replace(start, request=dataclasses.replace(start.request, key_data=key_data))
        tokens, length, played = _play(program, program.models(tables), state, controllers)
        tokens = np.take_along_axis(tokens, np.minimum(begin[:, None] + np.arange(N), S - 1), axis=1)
        texts += count_pairs(which, _code(tokens, length - begin), texts.shape)
        for before, changed, *what in played:
            live = what[1] >= 0
            code = np.ravel_multi_index((_code(tokens, before - begin), *np.maximum(what, 0)), shape)
            rounds += count_pairs(which[live], code[live], rounds.shape)
            changes += np.bincount(which[live & changed], minlength=len(asks))
    return [
        Adapted(t.reshape((V + 1,) * N), r.reshape(shape), int(c))
        for t, r, c in zip(texts, rounds, changes, strict=True)
    ]


def _play(program: Program, models, state: DecodeState, controllers: Controllers):
    """N rounds of a batch: tokens ``[B, S]``, length ``[B]``, and of each round, all ``[B]``, the length before it,
    whether K changed, K, drafted and accepted."""
    history, last, played = np.zeros(len(state.tokens), int), None, []
    for _ in range(N):
        chosen, length = controllers.chosen[history], np.asarray(state.request.length)
        if last is not None:
            state = _catch_up(program, *models, state, (chosen > 0) & (chosen < last))
        drafted = accepted = np.full(len(chosen), -1)
        for drafts in np.unique(chosen):
            state, log = _round(program, int(drafts), *models, state, chosen == drafts)
            drafted, accepted = np.maximum(drafted, log.drafted[0]), np.maximum(accepted, log.accepted[0])
        played.append((length, chosen != (chosen if last is None else last), chosen, drafted, accepted))
        history, last = controllers.after(history, np.maximum(accepted, 0)), chosen
    return np.asarray(state.tokens), np.asarray(state.request.length), played


@functools.partial(jax.jit, static_argnums=(0, 1))
def _round(program: Program, drafts: int, target, draft, state: DecodeState, rows):
    """A round of some rows, bool ``[B]``, in the program for so many drafts; the others wait."""
    waiting = dataclasses.replace(state, outcome=jnp.where(rows, state.outcome, STOPPED))
    own = program.drafter(target, draft, drafts or K)
    if drafts:
        after, logs = DecodeStep(target, own, program.rule, drafts + 1, program.noise).decode(waiting, 1)
    else:
        after, logs = DecodeStep(target, own, RULES["match"], 1, program.noise).decode_plainly(waiting, 1)
    return dataclasses.replace(after, outcome=jnp.where(rows, after.outcome, state.outcome)), RoundLog.unpacked(logs)


@functools.partial(jax.jit, static_argnums=0)
def _catch_up(program: Program, target, draft, state: DecodeState, rows) -> DecodeState:
    waiting = dataclasses.replace(state, outcome=jnp.where(rows, state.outcome, STOPPED))
    step = DecodeStep(target, program.drafter(target, draft), program.rule, K + 1, program.noise)
    return dataclasses.replace(step.catch_up(waiting, K + 1), outcome=state.outcome)
