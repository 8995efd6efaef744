"""How many drafts ``rejection`` and ``block`` accept in expectation over their uniforms, on the same rounds of sampled
drafts."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import EngineConfig
from jspec.engine.runner.state import AdmitInputs, RequestArrays, admit, init_state, of_rows
from jspec.engine.runner.step import DecodeStep
from jspec.engine.runner.step_io import PrefillInputs
from jspec.models.flatten import flatten
from jspec.models.params import DTYPES
from jspec.sampling.distribution import Warp, make_distribution
from jspec.sampling.params import MAX_STOP_TOKENS
from jspec.sampling.verify import rejection


@dataclasses.dataclass(frozen=True)
class Texts:
    """Prompts of one length, each to be continued by ``max_tokens`` tokens, all at one temperature."""

    prompts: Sequence[Sequence[int]]
    max_tokens: int
    temperature: float

    def request(self, row: int, config: EngineConfig) -> RequestArrays:
        M, length = config.pages_per_row, len(self.prompts[row])
        return RequestArrays(
            length=jnp.int32(length),
            limit=jnp.int32(length + self.max_tokens),
            min_length=jnp.int32(0),
            stop_tokens=jnp.full(MAX_STOP_TOKENS, -1, jnp.int32),
            key_data=jnp.array([1, row], jnp.uint32),
            table=1 + row * M + jnp.arange(M, dtype=jnp.int32),
            max_drafts=jnp.int32(config.max_len),
            warp=Warp(jnp.float32(self.temperature), jnp.int32(0), jnp.float32(1), jnp.float32(0)),
        )


class Recorder:
    """Rounds under ``rejection`` that also say what both rules would accept in expectation.

    Args:
      target, draft: modules.
      make: builds the drafter around them, with sampled drafts.
      config: of the engine.
    """

    def __init__(self, target: Any, draft: Any, make: Callable[[Any, Any], Any], config: EngineConfig):
        self.config, self.dtype = config, DTYPES[config.dtype]
        self._models, self._make = (target, draft), make
        (of, merge_of), (by, merge_by) = flatten(target), flatten(draft)
        self._leaves = (of, by)

        def step(leaves, verify) -> DecodeStep:
            model = merge_of(leaves[0])
            drafter = make(model, merge_by(leaves[1]))
            return DecodeStep(model, drafter, verify, drafter.num_draft_tokens + 1)

        def one_round(leaves, state):
            seen = []

            def verify(logits, warp, proposal, noise):
                seen.append(expectations(logits, warp, proposal))
                return rejection(logits, warp, proposal, noise)

            live = state.live
            state, _ = step(leaves, verify).round(state)
            return state, [jnp.where(live, x, 0.0) for x in seen[0]], live

        self._prefill = jax.jit(lambda leaves, state, segments: step(leaves, rejection).prefill(state, segments))
        self._round = jax.jit(one_round, donate_argnums=1)
        self._admit = jax.jit(admit)

    def with_draft(self, draft: Any) -> "Recorder":
        """The same compiled programs for another draft module, which differs in the values of arrays alone."""
        other = copy.copy(self)
        other._models, other._leaves = (self._models[0], draft), (self._leaves[0], flatten(draft).leaves)
        return other

    def acceptance_lengths(self, texts: Texts) -> tuple[float, float]:
        """Expected tokens per round under ``rejection`` and ``block``, the bonus or recovered token included."""
        target, draft = self._models
        state = init_state(self.config, target, self._make(target, draft), self.dtype)
        for row, prompt in enumerate(texts.prompts):
            request = texts.request(row, self.config)
            padded = np.zeros(self.config.max_len, np.int32)
            padded[: len(prompt)] = prompt
            first, count = np.zeros(1, np.int32), np.array([len(prompt) - 1], np.int32)
            segment = PrefillInputs(
                np.array([row], np.int32), padded[None, : len(prompt)], first, count, request.table[None]
            )
            state = self._prefill(self._leaves, state, segment)
            entry = AdmitInputs(
                np.array([row], np.int32), padded[None], jax.tree.map(lambda x: np.asarray(x)[None], request)
            )
            state = dataclasses.replace(state, **self._admit(of_rows(state), entry))
        sums, rounds = np.zeros(2), 0
        while np.any(live := np.asarray(state.live)):
            state, expected, _ = self._round(self._leaves, state)
            sums += [float(jnp.sum(x)) for x in expected]
            rounds += int(live.sum())
        by_rejection, by_block = 1 + sums / rounds
        return by_rejection, by_block


def expectations(logits, warp, proposal) -> tuple[jax.Array, jax.Array]:
    """Drafts that ``rejection`` and ``block`` accept in expectation, float32 ``[B]`` each, given what was drafted."""
    distribution, best = make_distribution(logits, warp)
    K = proposal.tokens.shape[1]
    first = dataclasses.replace(
        distribution, warped=type(distribution.warped)(*(x[:, :K] for x in distribution.warped))
    )
    point = jnp.where(proposal.tokens == best[:, :K], 0.0, -jnp.inf)
    log_p = jnp.where(distribution.greedy[:, None], point, first.log_prob(proposal.tokens))
    log_q = jnp.where(proposal.point_mass, 0.0, proposal.distribution.log_prob(proposal.tokens))
    ratio = jnp.where(jnp.arange(K, dtype=jnp.int32)[None] < proposal.count[:, None], log_p - log_q, -jnp.inf)
    stands, w = jnp.zeros(ratio.shape[0]), jnp.zeros(ratio.shape[0])  # log of the two products
    by_rejection, by_block = jnp.zeros(ratio.shape[0]), jnp.zeros(ratio.shape[0])
    for i in range(K):
        stands, w = stands + jnp.minimum(ratio[:, i], 0.0), jnp.minimum(w + ratio[:, i], 0.0)
        by_rejection, by_block = by_rejection + jnp.exp(stands), by_block + jnp.exp(w)
    return by_rejection, by_block
