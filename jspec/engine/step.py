"""What the compiled programs compute: rounds of draft -> verify -> accept -> commit, and the prefill before them.

A *round* drafts up to K tokens for each row, lets the target verify them in one pass, and commits what was accepted and
one token more. A *call* of the decode program makes several rounds without a visit to the host.

Shapes are fixed: a row that is finished, short of room or not speculating is masked, never reshaped. Every array that
outlives a call is in ``DecodeState``, which is donated.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafting.base import Context, Drafter, Prompt
from jspec.drafting.plain import NoDrafts
from jspec.engine.request import BROKEN, FULL, LIVE, STOPPED
from jspec.engine.state import DecodeState
from jspec.models.cache import PagedView
from jspec.models.contract import Target
from jspec.sampling.stops import first_stop, forbid_early_stops
from jspec.sampling.streams import RoundNoise
from jspec.sampling.verify import Proposal, Verdict

Verify = Callable[[jax.Array, Any, Proposal, RoundNoise], Verdict]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundLog:
    """What a round did, for the host. Logs of several rounds have an axis for them in front, ``[rounds, B]``.

    The entries of a row that did not take part in a round are -1, or 0 in ``count``.

    Attributes:
      tokens: int32 ``[B, K + 1]``, the tokens emitted, padded with -1.
      count: int32 ``[B]``, how many tokens were emitted.
      drafted: int32 ``[B]``, how many drafts were valid.
      accepted: int32 ``[B]``, how many of them the target accepted.
      outcome: int32 ``[B]``, the row's outcome after the round.
    """

    tokens: Any
    count: Any
    drafted: Any
    accepted: Any
    outcome: Any

    def packed(self) -> jax.Array:
        """Everything in one array, int32 ``[B, K + 5]``, which is one transfer to the host."""
        rest = (self.count, self.drafted, self.accepted, self.outcome)
        return jnp.concatenate([self.tokens, *(x[:, None] for x in rest)], axis=1)

    @classmethod
    def unpacked(cls, packed) -> "RoundLog":
        """The logs in an array ``[..., B, K + 5]``, on the host or in a trace."""
        return cls(packed[..., :-4], *(packed[..., i] for i in range(-4, 0)))

    def of_row(self, row: int) -> "RoundLog":
        """The part of one row in the logs ``[rounds, B]`` of a call: fields ``[rounds]``."""
        fields = (self.tokens, self.count, self.drafted, self.accepted, self.outcome)
        return RoundLog(*(field[:, row] for field in fields))

    @property
    def num_rounds(self) -> int:
        """Of the logs ``[rounds, B]`` of a call, on the host: how many rounds any row took part in."""
        return int(np.any(self.accepted >= 0, axis=1).sum())


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """The programs of an engine, as functions of the state: one round, calls of many, prefill, catching up.

    It is built inside a trace, around target, drafter and rule.

    Attributes:
      target: a ``Decoder`` or its like.
      drafter: how tokens are proposed.
      verify: the verification rule, one of ``sampling.verify.RULES``.
      width: how many query tokens the target reads for each row in a round. It is at least K + 1; the surplus is
        masked.
      noise: where the noise of a round comes from.
    """

    target: Target
    drafter: Drafter
    verify: Verify
    width: int
    noise: Callable[..., RoundNoise] = RoundNoise

    def round(self, state: DecodeState) -> tuple[DecodeState, RoundLog]:
        """Make one round of every live row."""
        noise = self.noise(state.request.key_data, state.request.length)
        draft, proposal = self._propose(state, noise)
        logits, features, cache = self._target(state, proposal)
        verdict = self.verify(logits, state.request.warp, proposal, noise)
        features = self._kept(state, features)
        return self._commit(dataclasses.replace(state, cache=cache, features=features, draft=draft), proposal, verdict)

    def decode(self, state: DecodeState, rounds: int) -> tuple[DecodeState, jax.Array]:
        """Make up to ``rounds`` rounds without a host visit, fewer once no row is live.

        Returns:
          the new state, and the logs of ``rounds`` rounds, packed, int32 ``[rounds, B, K + 5]``.
        """
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
        """Do as ``decode``, without drafts. At the end the drafter reads all that it missed, in one pass and not in one
        for each round."""
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
        """Let the drafter read the committed tokens that it has not read, or that it had only guessed.

        Its caches and features are then those of a request that has just entered, and a round of any K may follow.

        Args:
          state: the batch; only the drafter's part changes.
          slots: the most tokens that a row may have committed since ``previous``. With features, as many as there are
            features.
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
          tokens: int32 ``[1, C + 1]``. The first ``count`` of them are read; the one behind these is not read, but the
            drafter is told that it follows.
          start: int32 ``[]``, the position of the first token.
          count: int32 ``[]``, how many of the first C tokens are real.
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
        """Draft: the drafter's new state, and its proposal."""
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
        """One verify pass: logits after the newest token and after each draft, ``[B, width, V]``; the features there;
        and the new cache."""
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
        """The features to keep. Those of a round with drafts take the place of the old ones; a round without drafts
        adds its own."""
        if features is None or state.features is None:
            return None
        K = self.drafter.num_draft_tokens
        if K:
            return jnp.concatenate([features[:, : K + 1], state.features[:, K + 1 :]], axis=1)
        place = state.request.length - state.previous
        return state.features.at[jnp.arange(len(place)), place].set(features[:, 0], mode="drop")

    def _read(self, tokens, cache, view: PagedView):
        """Let the target read tokens: hidden states; the features that the drafter needs, None if it needs none; and
        the new cache."""
        if self.drafter.aux_layers is None:
            hidden, cache = self.target(tokens, view.positions, cache, view)
            return hidden, None, cache
        return self.target.with_auxiliary(tokens, view.positions, cache, view, self.drafter.aux_layers)

    def _commit(self, state: DecodeState, proposal: Proposal, verdict: Verdict) -> tuple[DecodeState, RoundLog]:
        """Write what the verdict lets through, up to a stop token and the length limit, and decide each row's outcome."""
        request, live = state.request, state.live
        B, K = proposal.tokens.shape
        offset = jnp.arange(K + 1, dtype=jnp.int32)[None]
        accepted, room = verdict.accepted, request.limit - request.length
        emitted = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
        emitted = jnp.where(offset == accepted[:, None], verdict.token[:, None], emitted)

        offered = accepted + verdict.ok  # logits that are no distribution emit nothing
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
