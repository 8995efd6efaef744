"""Rounds of a verification rule by itself, many at once: drafts are drawn as ``DraftModel`` draws them, then verified.

Target and draft are tables with one distribution for each history, found by the history's node in the tree of all token
sequences. So a distribution of another query token, a stale draft or a shifted position shows. Logits are multiples of
1/2, so that thresholds meet ties.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.sampling.distribution import Distribution, Warp, make_distribution
from jspec.sampling.streams import RoundNoise
from jspec.sampling.verify import RULES, Proposal
from lossless import distributions
from lossless.statistics import count_pairs
from lossless.table_model import stored

V, K, L = 4, 3, 3  # vocabulary; drafts in a round; tokens of the joint distribution: 64 cells
PROMPT_LENGTH = 1
BATCH = 6_144  # the same for every set of cases, so that they share one program for each rule and vocabulary
THREADS = 2  # batches in flight: a CPU runs a batch of small arrays on one core


def nodes(depth: int) -> int:
    """How many sequences of at most ``depth`` tokens there are; also the node of the first one that is longer."""
    return (V ** (depth + 1) - 1) // (V - 1)


def node(tokens) -> int:
    """The tree's number of a sequence: 0 is the empty one, node n is continued with token v by V n + 1 + v."""
    return functools.reduce(lambda parent, v: V * parent + 1 + v, tokens, 0)


def random_tables(seed: int, draft_vocab: int = V) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a target ``[nodes, V]`` and of a draft ``[nodes, draft_vocab]`` that knows something of it."""
    rng = np.random.default_rng(seed)
    target, noise = rng.normal(size=(2, nodes(L + K - 1), V))
    halves = lambda x: np.round(2 * x).astype(np.float32) / 2  # noqa: E731
    return halves(1.5 * target), halves(1.2 * target + 0.8 * noise)[:, :draft_vocab]


@dataclasses.dataclass(frozen=True)
class Case:
    """Settings that some rows of a mixed batch play; ``share`` says how many rows of each deal (``deal``) do."""

    draft: str = "sample"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    draft_temperature: float | None = None
    count: int = K
    share: int = 4

    @property
    def warp(self) -> distributions.Warp:
        return distributions.Warp(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def draft_warp(self) -> distributions.Warp:
        """The draft's settings; argmax is temperature 0, as in ``DraftModel``."""
        temperature = self.temperature if self.draft_temperature is None else self.draft_temperature
        return dataclasses.replace(self.warp, temperature=0.0 if self.draft == "argmax" else temperature)


def as_models(tables, case: Case) -> tuple[distributions.Model, distributions.Model]:
    """What target and draft are to the oracle; a narrower draft has no mass past its end."""

    @functools.cache
    def target(history):
        return distributions.distribution(tables[0][node(history)], case.warp)

    @functools.cache
    def draft(history):
        q = distributions.distribution(tables[1][node(history)], case.draft_warp)
        return np.pad(q, (0, V - len(q)))

    return target, draft


class Tally(NamedTuple):
    """Counts of what the rounds of a case emitted, or the probabilities of it.

    Attributes:
      first_round: ``[nodes(K + 1)]``, by the node of the tokens that the first round emitted. One less than their number
        is how many drafts were accepted.
      texts: ``[V**L]``, by the first L tokens, over as many rounds as they took.
    """

    first_round: np.ndarray
    texts: np.ndarray


def predicted(rule: str, case: Case, tables) -> Tally:
    """The probabilities that ``play``'s counts should follow."""
    target, draft = as_models(tables, case)
    first_round = np.zeros(nodes(K + 1))
    for tokens, mass in distributions.round_distribution(
        rule, case.draft == "coupled", target, draft, (), case.count
    ).items():
        first_round[node(tokens)] = mass
    return Tally(first_round, distributions.completion_distribution(target, (), L)[(slice(V),) * L].ravel())


def play(
    rule: str, cases: Sequence[Case], tables, samples: int, seed: int, noise: Callable[..., RoundNoise] = RoundNoise
) -> list[Tally]:
    """Play at least ``samples`` texts of every case that has a full share; all cases are mixed in every batch."""
    which, full = deal(cases, BATCH)
    settings = _settings([cases[i] for i in which])
    tables = tuple(map(stored, tables))

    def batch(i: int):
        key_data = jax.random.key_data(jax.random.split(jax.random.fold_in(jax.random.key(seed), i), len(which)))
        return jax.device_get(_texts(tables, settings, key_data, rule, noise))

    first_round, texts = np.zeros((len(cases), nodes(K + 1)), int), np.zeros((len(cases), V**L), int)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        # The first compiles, before there are threads: jax 0.10 that traces in two at once may take another trace for
        # it.
        for emitted, text in itertools.chain([batch(0)], pool.map(batch, range(1, -(-samples // full)))):
            first_round += count_pairs(which, emitted, first_round.shape)
            texts += count_pairs(which, text - nodes(L - 1), texts.shape)
    return [Tally(*tally) for tally in zip(first_round, texts, strict=True)]


def deal(cases: Sequence[Any], rows: int) -> tuple[np.ndarray, int]:
    """Which case each row of a batch plays, ``[rows]``, shuffled, and how many rows a full share has at least.

    A case has a ``share``: how many rows it takes of every round of dealing."""
    pattern = np.concatenate([np.full(case.share, i) for i, case in enumerate(cases)])
    which = np.random.default_rng(0).permutation(np.resize(pattern, rows))
    most = max(case.share for case in cases)
    return which, min(np.sum(which == i) for i, case in enumerate(cases) if case.share == most)


def as_warp(warps: Sequence[distributions.Warp]) -> Warp:
    """The settings of a batch, one entry per row."""
    column = lambda name, dtype: jnp.array([getattr(warp, name) for warp in warps], dtype)  # noqa: E731
    return Warp(
        *(column(name, jnp.int32 if name == "top_k" else jnp.float32) for name in distributions.Warp.__annotations__)
    )


class _Settings(NamedTuple):
    """Of a batch: the target's and the draft's warp, bool ``[B]`` coupled drafts, int32 ``[B]`` valid drafts."""

    warp: Warp
    draft_warp: Warp
    coupled: jax.Array
    count: jax.Array


def _settings(rows: Sequence[Case]) -> _Settings:
    coupled = jnp.array([row.draft == "coupled" for row in rows])
    count = jnp.array([row.count for row in rows], jnp.int32)
    return _Settings(as_warp([row.warp for row in rows]), as_warp([row.draft_warp for row in rows]), coupled, count)


def _round(tables, settings: _Settings, stream: RoundNoise, history, rule: str):
    """Draft after histories, int32 ``[B]``, and judge: the tokens emitted, int32 ``[B, K + 1]``, and how many."""

    def draw(history, i):
        index = jnp.full((history.shape[0], 1), i, jnp.int32)
        keys = jnp.where(settings.coupled[:, None, None], stream.sample_keys(index), stream.draft_keys(index))
        distribution, token = make_distribution(tables[1][history][:, None], settings.draft_warp, keys)
        return V * history + 1 + token[:, 0], (
            history,
            token[:, 0],
            jax.tree.map(lambda x: x[:, 0], distribution.warped),
        )

    last, drawn = jax.lax.scan(draw, history, jnp.arange(K, dtype=jnp.int32))
    path, drafts, rows = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), drawn)
    greedy = settings.draft_warp.greedy
    proposal = Proposal(
        drafts, settings.count, Distribution(rows, greedy), jnp.broadcast_to(greedy[:, None], drafts.shape)
    )
    logits = tables[0][jnp.concatenate([path, last[:, None]], axis=1)]
    result = RULES[rule](logits, settings.warp, proposal, stream)
    emitted = jnp.pad(drafts, ((0, 0), (0, 1)))
    offset = jnp.arange(K + 1, dtype=jnp.int32)[None]
    return jnp.where(offset == result.accepted[:, None], result.token[:, None], emitted), result.accepted + 1


@functools.partial(jax.jit, static_argnames=("rule", "noise"))
def _texts(tables, settings: _Settings, key_data, rule: str, noise):
    """Node of what the first round emitted, and of the first L tokens: int32 ``[B]`` each."""

    def commit(carry):
        history, length, first = carry
        emitted, many = _round(tables, settings, noise(key_data, PROMPT_LENGTH + length), history, rule)
        first = jnp.where(length == 0, _continued(history, emitted, many), first)
        take = jnp.minimum(many, L - length)
        return _continued(history, emitted, take), length + take, first

    empty = jnp.zeros(key_data.shape[0], jnp.int32)
    text, _, first = jax.lax.while_loop(lambda carry: jnp.any(carry[1] < L), commit, (empty, empty, empty))
    return first, text


def _continued(history, emitted, take):
    """Nodes of histories, int32 ``[B]``, and the first ``take`` tokens emitted after them."""
    for i in range(K + 1):
        history = jnp.where(i < take, V * history + 1 + emitted[:, i], history)
    return history
