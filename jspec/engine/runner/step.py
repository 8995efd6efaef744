"""What the compiled programs compute: rounds of drafting and verifying, and the prefill that comes before them.

A *round* drafts up to K tokens for each row, lets the target verify them in one pass, and commits the accepted drafts
and one token more. A *call* of a decode program makes several rounds without a visit to the host.

All shapes are fixed. A row that has finished, has no room for drafts or does not speculate is masked; no array changes
its shape. Every array that outlives a call is in ``DecodeState``, whose buffers are donated to each program.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jspec.drafting.base import Context, Drafter, Forced, Prompt
from jspec.drafting.plain import NoDrafts
from jspec.engine.adaptive.draft_admission import admitted
from jspec.engine.multihost.batch_sharded_verify import Dealing
from jspec.engine.request import BROKEN, FULL, LIVE, STOPPED
from jspec.engine.runner.state import DecodeState, processing_of
from jspec.engine.runner.step_io import CallLogs, RoundLog, Segments
from jspec.models.kv_cache import PagedView
from jspec.models.protocols import Target
from jspec.models.ragged_view import RaggedView
from jspec.sampling.confidence import confidence_of
from jspec.sampling.distribution import Warp, make_distribution
from jspec.sampling.logprobs import PACKED, TokenLogprobs, token_logprobs
from jspec.sampling.processors import Processing
from jspec.sampling.stops import first_stop
from jspec.sampling.streams import RoundNoise
from jspec.sampling.verify import Proposal, Verdict

SEGMENTS_AT_A_TIME = 8  # whose logits are computed together

Verify = Callable[[jax.Array, Any, Proposal, RoundNoise], Verdict]


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """Target, drafter and verification rule together: what the programs of an engine do, as functions of the state.

    A *round* takes every live row at some ``length``, its number of committed tokens, and does five things:

    1. **Draft.** The drafter proposes up to K tokens, and says from which distributions it drew them.
    2. **Verify pass.** The target reads the newest committed token, which its cache does not hold yet, and the drafts
       behind it: T = K + 1 query tokens at positions length - 1 .. length - 1 + K, in one pass. The logits of query token
       i are those of the token at position length + i.
    3. **Rule.** The logits become those that each request wants (``sampling.processors``). The verification rule decides
       how many drafts, a, stand. It draws one more token: the correction token in place of the first refused draft, or the
       bonus token if no draft was refused.
    4. **Keep features.** If the drafter reads features of the target, those of this pass are kept for the next round.
    5. **Commit.** The a drafts and the token of the rule are written at positions length .. length + a, and ``length``
       grows by a + 1, or by less at a stop token or the length limit.

    For example, a row with 10 committed tokens and K = 4 whose first two drafts are accepted has 13 committed tokens
    afterwards. The pass wrote keys and values at positions 9 .. 13 of the target's cache, and those at 12 and 13 belong
    to refused drafts. Nothing removes them: the next round begins at position length - 1 = 12, and writes both again
    before any query token attends to them.

    Noise depends only on a request's key and on ``length`` when the round began, so that no draw is ever repeated
    (``sampling.streams``). A ``DecodeStep`` is built inside a trace (``StepBuilder`` in ``programs.py``).

    Attributes:
      target: the model whose distribution the text has, a ``Decoder`` or its like.
      drafter: how tokens are proposed.
      verify: the verification rule, one of ``sampling.verify.RULES``.
      width: how many query tokens the target reads for each row in a round. It is at least T = K + 1, and query tokens
        beyond the drafts are masked.
      noise: makes the noise of a round from the keys and lengths of its rows.
      expand_latents: whether prefill may expand latents, as ``EngineConfig.expand_latents`` says.
      logprobs_mode: whose log-probabilities the logs have, as ``EngineConfig.logprobs_mode`` says; None is nobody's.
      budget: R, how many tokens the target reads in a round at most, of all rows together. It is B or more: each row's
        newest token is read. Of the drafts it reads those that are likeliest to be accepted, and the others count as if
        they had not been made (``engine.survival``). None is all.

    Example::

        def rounds(step: DecodeStep, state: DecodeState, count: int):
            for _ in range(count):
                state, log = step.round(state)
            return state, log  # log.count has how many tokens each row emitted last
    """

    target: Target
    drafter: Drafter
    verify: Verify
    width: int
    noise: Callable[..., RoundNoise] = RoundNoise
    expand_latents: bool = False
    logprobs_mode: str | None = None
    budget: int | None = None

    def round(self, state: DecodeState) -> tuple[DecodeState, RoundLog]:
        """Make one round with every live row: draft, verify pass, rule, keep features, commit.

        Returns:
          the new state, and a log with fields ``[B]``.
        """
        state, proposal = self.draft(state)
        if state.seen is None:
            return self.judge(state, proposal)
        confidence, live = confidence_of(proposal), state.live
        if self.budget is not None:
            spare = self.budget - jnp.sum(live, dtype=jnp.int32)
            count = admitted(state.seen.acceptance(confidence), proposal.count, spare)
            proposal = dataclasses.replace(proposal, count=count)
        after, log = self.judge(state, proposal)
        seen = state.seen.after(confidence, proposal.count, log.accepted, live)
        after = dataclasses.replace(after, seen_of_request=seen.of_request, seen_of_confidence=seen.of_confidence)
        return after, log

    def draft(self, state: DecodeState, forced: Forced | None = None) -> tuple[DecodeState, Proposal]:
        """The first half of a round: what the drafter proposes for each live row.

        Args:
          state: the batch. Only the drafter's state changes.
          forced: drafts that take the place of the drafter's own.
        """
        draft, proposal = self._propose(state, processing_of(state), self._noise(state), forced)
        return dataclasses.replace(state, draft=draft), proposal

    def judge(self, state: DecodeState, proposal: Proposal, allowed=None) -> tuple[DecodeState, RoundLog]:
        """The second half of a round: verify pass, rule, keep features, commit.

        Args:
          state: the batch after ``draft``.
          proposal: what was drafted.
          allowed: uint32 ``[B, width, ceil(V / 32)]``, which tokens may come at each position from ``length`` on if all
            drafts before it stand, as ``Processing`` has it; None allows all.
        """
        hidden, features, cache, view = self._verify_pass(state, proposal)
        dealing = Dealing.of(self.target, hidden)
        mine: Any = (lambda tree: tree) if dealing is None else dealing.mine
        logits = self.target.logits(hidden) if dealing is None else dealing.logits(self.target, hidden)
        if isinstance(view, RaggedView):
            logits = view.to_rows(logits)
        # What verdicts depend on; of the rest of this state nothing is read.
        rows = dataclasses.replace(state, tokens=mine(state.tokens), request=mine(state.request))
        drafts, processing = proposal.by_row(mine), dataclasses.replace(processing_of(rows), grammar=mine(allowed))
        verdict = self._verdict(rows, processing, logits, drafts)
        if dealing is not None:
            verdict = dealing.verdicts(verdict)
        features = self._kept_features(state, features)
        after, log = self._commit(dataclasses.replace(state, cache=cache, features=features), proposal, verdict)
        if self.logprobs_mode is None:
            return after, log
        logprobs = self._logprobs(processing, rows.request.warp, logits, drafts, mine(log.tokens)).packed()
        return after, dataclasses.replace(log, logprobs=logprobs if dealing is None else dealing.everyone(logprobs))

    def _noise(self, state: DecodeState) -> RoundNoise:
        return self.noise(state.request.key_data, state.request.length)

    def decode(self, state: DecodeState, most_rounds: int, rounds=None) -> tuple[DecodeState, CallLogs]:
        """Make ``rounds`` rounds without a host visit, or fewer if no row is live any more.

        Args:
          state: the rows to decode.
          most_rounds: the length of the logs.
          rounds: int32 ``[]``, at most ``most_rounds``; None is that number.

        Returns:
          the new state, and the logs of ``most_rounds`` rounds. A round that was not made has the log of a round in which no
          row took part.
        """
        rounds = most_rounds if rounds is None else rounds
        none = jnp.full(state.request.length.shape, -1, jnp.int32)  # a row has taken no part
        tokens = jnp.full((*none.shape, self.drafter.num_draft_tokens + 1), -1, jnp.int32)
        empty = RoundLog(tokens, jnp.zeros_like(none), none, none, none).packed()
        wanted = self.logprobs_mode is not None
        logprobs = jnp.zeros((most_rounds, *tokens.shape, PACKED), jnp.int32) if wanted else None

        def unfinished(carry):
            i, state, _ = carry
            return (i < rounds) & jnp.any(state.live)

        def body(carry):
            i, state, logs = carry
            state, log = self.round(state)
            logprobs = None if logs.logprobs is None else logs.logprobs.at[i].set(log.logprobs)
            return i + 1, state, CallLogs(logs.rounds.at[i].set(log.packed()), logprobs)  # one kernel writes a log

        logs = CallLogs(jnp.broadcast_to(empty[None], (most_rounds, *empty.shape)), logprobs)
        _, state, logs = jax.lax.while_loop(unfinished, body, (jnp.int32(0), state, logs))
        return state, logs

    def decode_plainly(self, state: DecodeState, most_rounds: int, rounds=None) -> tuple[DecodeState, CallLogs]:
        """Do as ``decode``, but without drafts, and let the drafter catch up in one pass at the end.

        This is what K = 0 means where the engine chooses K: a later round may draft again, so the drafter has to read
        the tokens that were committed meanwhile. Every round adds its feature behind those that the state holds, for
        which the array ``[B, K + 1, E]`` is widened by ``most_rounds`` during the call.

        Returns:
          the new state, and the logs of rounds with K = 0.
        """
        resting = dataclasses.replace(self, drafter=NoDrafts(self.drafter.aux_layers))
        features = state.features
        if features is not None:
            state = dataclasses.replace(state, features=jnp.pad(features, ((0, 0), (0, most_rounds), (0, 0))))
        state, logs = resting.decode(state, most_rounds, rounds)
        state = self.catch_up(state, self.drafter.num_draft_tokens + 1 + most_rounds)
        if features is not None and state.features is not None:
            state = dataclasses.replace(state, features=state.features[:, : features.shape[1]])
        return state, logs

    def catch_up(self, state: DecodeState, slots: int) -> DecodeState:
        """Let the drafter read the committed tokens that it has not read, or that it has read only as its own drafts.

        A drafter normally does that at the start of a round, in a window that is as long as its own K makes necessary.
        After plain rounds, and before rounds of a smaller K, that window would be too short. Afterwards the drafter's
        caches and features are those of a request that has just entered a row, so a round of any K may follow.

        The drafter reads the tokens at positions ``previous - 1`` to ``length - 2``. The feature at ``length - 2``, the
        last that the target has computed, becomes the first entry of ``features``, and ``previous`` becomes
        ``length - 1``.

        Args:
          state: the batch. Only the drafter's state, ``features`` and ``previous`` change.
          slots: the most positions that a row may have to read, which fixes the shape of the pass. If the drafter
            reads features, it is also their number, ``state.features.shape[1]``.
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

    def prefill(self, state: DecodeState, segments: Segments) -> DecodeState:
        """Read n segments of c tokens, of one prompt or of several, into the caches of target and drafter.

        In each layer all keys and values are written before any query attends, so a segment may follow another one of
        the same prompt in the same pass. The segments of a prompt cover all of its tokens but the last, which the target
        reads as query token 0 of the first round. The feature of the last token read goes to ``features[row, 0]``, where
        the first round finds it.

        Args:
          state: the batch. Only the caches change, and the features of rows whose prompt ends in this pass.
          segments: what to read.
        """
        return self._read(state, segments)[0]

    def prefill_with_logprobs(self, state: DecodeState, segments: Segments) -> tuple[DecodeState, jax.Array]:
        """Do as ``prefill``, and find the log-probability of the token behind each token that is read.

        Returns:
          the new state, and ``TokenLogprobs.packed`` of ``segments.tokens[:, 1:]``, int32 ``[n, c, PACKED]``.
        """
        state, hidden = self._read(state, segments)

        def of_segment(segment):
            hidden, following = segment
            return token_logprobs(_as_float32(self.target.logits(hidden)), following).packed()

        # Few segments at a time, because the logits of all of them would not fit.
        return state, jax.lax.map(of_segment, (hidden, segments.tokens[:, 1:]), batch_size=SEGMENTS_AT_A_TIME)

    def _read(self, state: DecodeState, segments: Segments) -> tuple[DecodeState, jax.Array]:
        """``prefill``, and the target's hidden states ``[n, c, D]``."""
        c = segments.tokens.shape[1] - 1
        offset = jnp.arange(c, dtype=jnp.int32)[None]
        valid = offset < segments.count[:, None]
        positions = segments.start[:, None] + offset
        view = PagedView(segments.table, positions, valid, shared=True, may_up_project=self.expand_latents)
        tokens, following = segments.tokens[:, :c], segments.tokens[:, 1:]
        hidden, features, cache = self._target_reads(tokens, state.cache, view)
        draft = self.drafter.prefill(state.draft, Prompt(tokens, following, features, view))
        state = dataclasses.replace(state, cache=cache, draft=draft)
        if features is None or state.features is None:
            return state, hidden
        newest = jnp.take_along_axis(features, jnp.maximum(segments.count - 1, 0)[:, None, None], axis=1)[:, 0]
        features = state.features.at[segments.row, 0].set(newest, mode="drop")
        return dataclasses.replace(state, features=features), hidden

    def _propose(self, state: DecodeState, processing: Processing, noise: RoundNoise, forced: Forced | None):
        """Let the drafter propose up to K tokens for each row.

        A row may use ``room`` drafts, the most that leave a slot for the token that the rule adds: K of them, fewer near
        the end of its S slots or where its request wants fewer, and none if the row is not live. So how many count is
        settled before any is drawn, and drafts behind them are no refused ones: a bonus token follows the last that counts.

        Returns:
          the drafter's new state, and its proposal, with tokens ``[B, K]``.
        """
        request, S = state.request, state.tokens.shape[1]
        K = self.drafter.num_draft_tokens
        room = jnp.minimum(jnp.clip(S - 1 - request.length, 0, K), request.max_drafts)
        room = jnp.where(state.live, room, 0)
        context = Context(
            tokens=state.tokens,
            length=request.length,
            previous=state.previous,
            features=None if state.features is None else state.features[:, : K + 1],
            live=state.live,
            room=room,
            table=request.table,
            warp=request.warp,
            processing=processing,
            noise=noise,
            forced=forced,
        )
        return self.drafter.propose(state.draft, context)

    def _verify_pass(self, state: DecodeState, proposal: Proposal):
        """Let the target read the newest committed token and the drafts of every row, in one pass.

        The pass has ``width`` query tokens. Those behind the valid drafts of a row, and all of a row that is not live,
        are masked: they write nothing to the cache, and their logits mean nothing.

        Returns:
          hidden states ``[B, width, D]``, of entry i the logits are those of the token at position length + i; features
          ``[B, width, E]``, or None; the new cache; and the view through which the target read. With a ``RaggedView`` the
          hidden states are those of its tokens, ``[1, R, D]``.
        """
        request = state.request
        newest = jnp.take_along_axis(state.tokens, request.length[:, None] - 1, axis=1)
        tokens = jnp.concatenate([newest, proposal.tokens], axis=1)
        tokens = jnp.pad(tokens, ((0, 0), (0, self.width - tokens.shape[1])))
        offset = jnp.arange(self.width, dtype=jnp.int32)[None]
        positions = request.length[:, None] - 1 + offset
        valid = state.live[:, None] & (offset <= proposal.count[:, None])
        rows = PagedView(request.table, positions, valid)
        if self.budget is None:
            return *self._target_reads(tokens, state.cache, rows), rows
        view = RaggedView.of(rows, self.budget)
        hidden, features, cache = self._target_reads(view.from_rows(tokens), state.cache, view)
        return hidden, view.to_rows(features), cache, view

    def _verdict(self, state: DecodeState, processing: Processing, logits, proposal: Proposal) -> Verdict:
        """What the rule decides under the logits as the requests want them.

        A penalty of 0.1 would be lost in the rounding of bfloat16 logits, so those with processors are float32. A row that
        wants nothing has the same distribution either way.
        """
        if processing.processors is not None:
            logits = _as_float32(logits)
        logits = processing.apply(logits, proposal.tokens)
        return self.verify(logits, state.request.warp, proposal, self._noise(state))

    def _logprobs(self, processing: Processing, warp: Warp, logits, proposal: Proposal, tokens) -> TokenLogprobs:
        """Those of the emitted tokens, int32 ``[B, K + 1]``."""
        logits = logits[:, : tokens.shape[1]]
        if self.logprobs_mode == "raw_logprobs":
            return token_logprobs(_as_float32(logits), tokens)
        logits = processing.apply(_as_float32(logits), proposal.tokens)
        return token_logprobs(make_distribution(logits, warp)[0].log_probs, tokens)

    def _kept_features(self, state: DecodeState, features):
        """The features ``[B, n, E]`` that the drafter finds at its next round; None if it reads none.

        Entry j belongs to position previous - 1 + j. A round with drafts moves ``previous`` up to its ``length``, so its
        K + 1 features replace the old ones. A round without drafts leaves ``previous`` where it is, so its one feature,
        at position length - 1, is added as entry length - previous.

        Args:
          state: the batch before the commit.
          features: ``[B, width, E]``, those of the verify pass, or None.
        """
        if features is None or state.features is None:
            return None
        K = self.drafter.num_draft_tokens
        if K:
            return jnp.concatenate([features[:, : K + 1], state.features[:, K + 1 :]], axis=1)
        place = state.request.length - state.previous
        return state.features.at[jnp.arange(len(place)), place].set(features[:, 0], mode="drop")

    def _target_reads(self, tokens, cache, view: PagedView | RaggedView):
        """Let the target read tokens ``[B, T]`` at the positions of ``view``.

        Returns:
          hidden states ``[B, T, D]``; the features ``[B, T, E]`` that the drafter needs, or None; and the new cache.
        """
        if self.drafter.aux_layers is None:
            hidden, cache = self.target(tokens, view.positions, cache, view)
            return hidden, None, cache
        return self.target.with_auxiliary(tokens, view.positions, cache, view, self.drafter.aux_layers)

    def _commit(self, state: DecodeState, proposal: Proposal, verdict: Verdict) -> tuple[DecodeState, RoundLog]:
        """Append each row's accepted drafts and the rule's token to its text, and decide the row's outcome.

        A row emits ``count`` tokens: the accepted drafts and the rule's token, up to and including the first stop token,
        and no more than its length limit allows. If the logits behind the rule's token are not finite, the accepted
        drafts are still emitted, that token is not, and the row ends as BROKEN.

        Returns:
          the new state, with longer texts, and the log of the round.
        """
        request, live = state.request, state.live
        B, K = proposal.tokens.shape
        offset = jnp.arange(K + 1, dtype=jnp.int32)[None]
        accepted, room = verdict.accepted, request.limit - request.length
        emitted = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
        emitted = jnp.where(offset == accepted[:, None], verdict.token[:, None], emitted)

        offered = accepted + verdict.ok  # logits that make no distribution emit no token
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


def _as_float32(logits) -> jax.Array:
    """The stored logits in float32. Without the barrier XLA may skip the rounding to what is stored."""
    return jax.lax.optimization_barrier(logits).astype(jnp.float32)
