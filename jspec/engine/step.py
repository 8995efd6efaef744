"""ONE decode step: draft -> verify -> accept -> commit, the program that jit compiles; and the prefill beside it.

Shapes are fixed: a row that is finished, short of room or not speculating is masked, never reshaped. Every array that
outlives a call is in ``DecodeState``, which is donated.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jspec.drafting.base import Context, Drafter, Prompt
from jspec.drafting.plain import NoDrafts
from jspec.engine.state import BROKEN, FULL, LIVE, STOPPED, DecodeState
from jspec.models.cache import PagedView
from jspec.models.contract import Target
from jspec.sampling.stops import first_stop, forbid_early_stops
from jspec.sampling.streams import RoundNoise
from jspec.sampling.verify import Proposal, Verdict

Verify = Callable[[jax.Array, Any, Proposal, RoundNoise], Verdict]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundLog:
    """What a round did, for the host; entries of rows that did not take part are -1, or 0 in ``count``.

    Attributes:
      tokens: int32 ``[B, K + 1]``, the tokens emitted, padded with -1.
      count: int32 ``[B]``, how many.
      drafted: int32 ``[B]``, valid drafts of the round.
      accepted: int32 ``[B]``, those that the target accepted.
      outcome: int32 ``[B]``, the row's outcome after the round.
    """

    tokens: Any
    count: Any
    drafted: Any
    accepted: Any
    outcome: Any

    def packed(self) -> jax.Array:
        """All of it in one array, which is one transfer to the host: int32 ``[B, K + 5]``."""
        rest = (self.count, self.drafted, self.accepted, self.outcome)
        return jnp.concatenate([self.tokens, *(x[:, None] for x in rest)], axis=1)

    @classmethod
    def unpacked(cls, packed) -> "RoundLog":
        """Of an array of logs, ``[..., B, K + 5]``, on the host or in a trace."""
        return cls(packed[..., :-4], *(packed[..., i] for i in range(-4, 0)))


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """A decode round, built inside a trace around target, drafter and rule.

    Attributes:
      target: a ``Decoder`` or its like.
      drafter: how tokens are proposed.
      verify: one of ``sampling.verify.RULES``.
      width: rows that the target reads per round and row of the batch, at least K + 1; the surplus is masked.
      noise: where the round's noise comes from.
    """

    target: Target
    drafter: Drafter
    verify: Verify
    width: int
    noise: Callable[..., RoundNoise] = RoundNoise

    def round(self, state: DecodeState) -> tuple[DecodeState, RoundLog]:
        """One round of every live row."""
        noise = self.noise(state.request.key_data, state.request.length)
        draft, proposal = self._propose(state, noise)
        logits, features, cache = self._target(state, proposal)
        verdict = self.verify(logits, state.request.warp, proposal, noise)
        features = self._kept(state, features)
        return self._commit(dataclasses.replace(state, cache=cache, features=features, draft=draft), proposal, verdict)

    def decode(self, state: DecodeState, rounds: int) -> tuple[DecodeState, jax.Array]:
        """Up to ``rounds`` rounds without a host visit, fewer once no row is live, and the logs of ``rounds``,
        packed."""
        none = jax.tree.map(lambda leaf: jnp.full(leaf.shape, -1, leaf.dtype), jax.eval_shape(self.round, state)[1])
        empty = dataclasses.replace(none, count=jnp.zeros_like(none.count)).packed()

        def unfinished(carry):
            i, state, _ = carry
            return (i < rounds) & jnp.any(state.live)

        def body(carry):
            i, state, logs = carry
            state, log = self.round(state)
            return i + 1, state, logs.at[i].set(log.packed())  # one array: one kernel writes it

        logs = jnp.broadcast_to(empty[None], (rounds, *empty.shape))
        _, state, logs = jax.lax.while_loop(unfinished, body, (jnp.int32(0), state, logs))
        return state, logs

    def decode_plainly(self, state: DecodeState, rounds: int) -> tuple[DecodeState, jax.Array]:
        """``decode`` without drafts, after which the drafter reads all that it missed: it pays one pass, not one a
        round."""
        resting = dataclasses.replace(self, drafter=NoDrafts(self.drafter.aux_layers))
        features = state.features
        if features is not None:
            state = dataclasses.replace(state, features=jnp.pad(features, ((0, 0), (0, rounds), (0, 0))))
        state, logs = resting.decode(state, rounds)
        state = self.catch_up(state, self.drafter.num_draft_tokens + 1 + rounds)
        if features is not None and state.features is not None:
            state = dataclasses.replace(state, features=state.features[:, : features.shape[1]])
        return state, logs

    def catch_up(self, state: DecodeState, slots: int) -> DecodeState:
        """The drafter reads the committed tokens that it has not, or that it had only guessed: its caches and features
        are then those of a request that has just entered, and a round of any K may follow.

        Args:
          state: the batch; only the drafter's part changes.
          slots: most tokens that a row may have committed since ``previous``; with features, as many as there are.
        """
        request, live = state.request, state.live
        behind = request.length - 1 - state.previous
        positions = state.previous[:, None] - 1 + jnp.arange(slots, dtype=jnp.int32)[None]
        valid = live[:, None] & (positions >= 0) & (positions < request.length[:, None] - 1)
        tokens = jnp.take_along_axis(state.tokens, jnp.clip(positions, 0, state.tokens.shape[1] - 1), axis=1)
        following = jnp.take_along_axis(state.tokens, jnp.clip(positions + 1, 0, state.tokens.shape[1] - 1), axis=1)
        view = PagedView(request.table, positions, valid)
        draft = self.drafter.prefill(state.draft, Prompt(tokens, following, state.features, view))
        previous = jnp.where(live, request.length - 1, state.previous)
        state = dataclasses.replace(state, draft=draft, previous=previous)
        if state.features is None:
            return state
        newest = jnp.take_along_axis(state.features, jnp.clip(behind, 0, slots - 1)[:, None, None], axis=1)
        return dataclasses.replace(state, features=jnp.concatenate([newest, state.features[:, 1:]], axis=1))

    def prefill(self, state: DecodeState, row, tokens, start, count, table) -> DecodeState:
        """Read one chunk of one prompt into the caches of target and drafter.

        Args:
          state: the batch; only its caches change, and the features of ``row``.
          row: int32 ``[]``, the free row that the request will enter.
          tokens: int32 ``[1, C + 1]``; the last of them, and whatever follows ``count``, is not read but follows.
          start: int32 ``[]``, position of the first of them.
          count: int32 ``[]``, how many of the first C are real.
          table: int32 ``[1, M]``, the request's pages.
        """
        C = tokens.shape[1] - 1
        offset = jnp.arange(C, dtype=jnp.int32)[None]
        view = PagedView(table, start + offset, offset < count)
        _, features, cache = self._read(tokens[:, :C], state.cache, view)
        draft = self.drafter.prefill(state.draft, Prompt(tokens[:, :C], tokens[:, 1:], features, view))
        state = dataclasses.replace(state, cache=cache, draft=draft)
        if features is None or state.features is None:
            return state
        newest = jnp.take(features[0], jnp.maximum(count - 1, 0), axis=0)
        return dataclasses.replace(state, features=state.features.at[row, 0].set(newest))

    def _propose(self, state: DecodeState, noise: RoundNoise):
        request, S = state.request, state.tokens.shape[1]
        K = self.drafter.num_draft_tokens
        room = jnp.where(state.live, jnp.clip(S - 1 - request.length, 0, K), 0)
        context = Context(
            tokens=state.tokens,
            length=request.length,
            previous=state.previous,
            features=None if state.features is None else state.features[:, : K + 1],
            live=state.live,
            room=room,
            table=request.table,
            warp=request.warp,
            stop_tokens=request.stop_tokens,
            min_length=request.min_length,
            noise=noise,
        )
        return self.drafter.propose(state.draft, context)

    def _target(self, state: DecodeState, proposal: Proposal):
        """Logits after the newest token and after each draft, ``[B, width, V]``, features there, and the new cache."""
        request = state.request
        newest = jnp.take_along_axis(state.tokens, request.length[:, None] - 1, axis=1)
        tokens = jnp.concatenate([newest, proposal.tokens], axis=1)
        tokens = jnp.pad(tokens, ((0, 0), (0, self.width - tokens.shape[1])))
        offset = jnp.arange(self.width, dtype=jnp.int32)[None]
        positions = request.length[:, None] - 1 + offset
        valid = state.live[:, None] & (offset <= proposal.count[:, None])
        hidden, features, cache = self._read(tokens, state.cache, PagedView(request.table, positions, valid))
        logits = forbid_early_stops(self.target.logits(hidden), positions + 1, request.stop_tokens, request.min_length)
        return logits, features, cache

    def _kept(self, state: DecodeState, features):
        """The features to keep: what a round with drafts read takes the place of the old, one without adds its own."""
        if features is None or state.features is None:
            return None
        K = self.drafter.num_draft_tokens
        if K:
            return jnp.concatenate([features[:, : K + 1], state.features[:, K + 1 :]], axis=1)
        place = state.request.length - state.previous
        return state.features.at[jnp.arange(len(place)), place].set(features[:, 0], mode="drop")

    def _read(self, tokens, cache, view: PagedView):
        """The target reads tokens: hidden states, the features that the drafter needs (None for none), and the
        cache."""
        if self.drafter.aux_layers is None:
            hidden, cache = self.target(tokens, view.positions, cache, view)
            return hidden, None, cache
        return self.target.with_auxiliary(tokens, view.positions, cache, view, self.drafter.aux_layers)

    def _commit(self, state: DecodeState, proposal: Proposal, verdict: Verdict) -> tuple[DecodeState, RoundLog]:
        request, live = state.request, state.live
        B, K = proposal.tokens.shape
        offset = jnp.arange(K + 1, dtype=jnp.int32)[None]
        accepted, room = verdict.accepted, request.limit - request.length
        emitted = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
        emitted = jnp.where(offset == accepted[:, None], verdict.token[:, None], emitted)

        offered = accepted + verdict.ok  # a target row that is no distribution emits nothing
        stop = first_stop(jnp.where(offset < offered[:, None], emitted, -2), request.stop_tokens)
        count = jnp.where(live, jnp.minimum(jnp.minimum(offered, stop + 1), room), 0)
        outcome = jnp.where(stop < count, STOPPED, jnp.where(count == room, FULL, jnp.where(verdict.ok, LIVE, BROKEN)))
        outcome = jnp.where(live, outcome, state.outcome)

        position = jnp.where(offset < count[:, None], request.length[:, None] + offset, state.tokens.shape[1])
        tokens = state.tokens.at[jnp.arange(B)[:, None], position].set(emitted, mode="drop")
        state = dataclasses.replace(
            state,
            tokens=tokens,
            outcome=outcome,
            previous=jnp.where(live & (K > 0), request.length, state.previous),
            request=dataclasses.replace(request, length=request.length + count),
        )
        log = RoundLog(
            tokens=jnp.where(offset < count[:, None], emitted, -1),
            count=count,
            drafted=jnp.where(live, proposal.count, -1),
            accepted=jnp.where(live, accepted, -1),
            outcome=outcome,
        )
        return state, log
