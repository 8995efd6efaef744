"""What the compiled programs compute: rounds of drafting and verifying, and the prefill before them.

A *round* drafts up to K tokens for each row, lets the target verify them in one pass, and commits the accepted drafts
and one token more. A *call* of a decode program makes several rounds without a visit to the host.

All shapes are fixed. A row that has finished, has no room for drafts or does not speculate is masked; no array changes
its shape. Every array that outlives a call is in ``DecodeState``, whose buffers are donated to each program.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.drafting.base import Context, Drafter
from jspec.drafting.plain import NoDrafts
from jspec.engine.adaptive.draft_selection import select_drafts
from jspec.engine.multihost.batch_sharded_verify import BatchSharding
from jspec.engine.round_log import CallLogs, RoundLog
from jspec.engine.runner.commit import commit, next_features
from jspec.engine.runner.prefill import catch_up, prefill, prompt_logprobs, run_target
from jspec.engine.runner.state import DecodeState, RequestArrays, processing_of
from jspec.engine.runner.step_io import PrefillInputs
from jspec.engine.runner.tree import follow
from jspec.models.kv_cache import PagedView
from jspec.models.protocols import Target
from jspec.models.ragged_view import RaggedView
from jspec.sampling.confidence import confidence_of
from jspec.sampling.distribution import make_distribution
from jspec.sampling.logprobs import PACKED, TokenLogprobs, as_float32, token_logprobs
from jspec.sampling.processors import Processing
from jspec.sampling.streams import RoundNoise
from jspec.sampling.tree import Tree
from jspec.sampling.verify import Proposal, VerifyResult

Rule = Callable[[jax.Array, Any, Proposal, RoundNoise], VerifyResult]


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """The computation of every program of an engine, as functions of the state: target, drafter and verification rule.

    A *round* takes every live row at some ``length``, its number of committed tokens, and does five things:

    1. **Draft.** The drafter proposes up to K tokens, and gives the distributions that it drew them from.
    2. **Verify pass.** The target reads the newest committed token, which its cache does not hold yet, and the drafts
       behind it: T = K + 1 query tokens at positions length - 1 .. length - 1 + K, in one pass. The logits of query token
       i are those of the token at position length + i.
    3. **Rule.** The logits become those that each request wants (``sampling.processors``). The verification rule decides
       how many drafts, a, stand. It draws one more token: the recovered token in place of the first rejected draft, or the
       bonus token if no draft was rejected.
    4. **Store features.** If the drafter reads features of the target, those of this pass are stored for the next round.
    5. **Commit.** The a drafts and the token of the rule are written at positions length .. length + a, and ``length``
       grows by a + 1, or by less at a stop token or the length limit.

    For example, a row with 10 committed tokens and K = 4 whose first two drafts are accepted has 13 committed tokens
    afterwards. The pass wrote keys and values at positions 9 .. 13 of the target's cache, and those at 12 and 13 belong
    to rejected drafts. They are not removed: the next round begins at position length - 1 = 12, and writes both again
    before any query token attends to them.

    Noise depends only on a request's key and on ``length`` when the round began, so no draw is ever repeated
    (``sampling.streams``). A ``DecodeStep`` is built inside a trace (``StepBuilder``).

    Attributes:
      target: the model whose distribution the text has, a ``Decoder`` for example.
      drafter: proposes tokens.
      rule: the verification rule, one of ``sampling.verify.RULES``.
      width: how many query tokens the target reads for each row in a round. It is at least T = K + 1, and query tokens
        beyond the drafts are masked.
      noise: makes the noise of a round from the keys and lengths of its rows.
      expand_latents: whether prefill may up-project latents, as ``EngineConfig.expand_latents`` says.
      logprobs: whether the logs have log-probabilities, each row's as ``RequestArrays.processed_logprobs`` says.
      budget: R, how many tokens the target reads in a round at most, of all rows together. It is B or more: each row's
        newest token is read. Of the drafts it reads those that are likeliest to be accepted, and the others count as if
        they had not been made (``engine.adaptive.draft_selection``). None for all.

    Example::

        def rounds(step: DecodeStep, state: DecodeState, count: int):
            for _ in range(count):
                state, log = step.round(state)
            return state, log  # log.count has how many tokens each row emitted last
    """

    target: Target
    drafter: Drafter
    rule: Rule
    width: int
    noise: Callable[..., RoundNoise] = RoundNoise
    expand_latents: bool = False
    logprobs: bool = False
    budget: int | None = None

    def round(self, state: DecodeState) -> tuple[DecodeState, RoundLog]:
        """Make one round with every live row: draft, verify pass, rule, store features, commit.

        Returns:
          the new state, and a log with fields ``[B]``.
        """
        state, proposal = self.draft(state)
        if state.acceptance_stats is None or isinstance(proposal, Tree):
            return self.verify(state, proposal)
        confidence, live = confidence_of(proposal), state.live
        if self.budget is not None:
            spare = self.budget - jnp.sum(live, dtype=jnp.int32)
            count = select_drafts(state.acceptance_stats.acceptance(confidence), proposal.count, spare)
            proposal = dataclasses.replace(proposal, count=count)
        after, log = self.verify(state, proposal)
        stats = state.acceptance_stats.with_round(confidence, proposal.count, log.accepted, live)
        after = dataclasses.replace(after, stats_of_request=stats.of_request, stats_of_confidence=stats.of_confidence)
        return after, log

    def draft(self, state: DecodeState) -> tuple[DecodeState, Any]:
        """The first half of a round: a ``Proposal`` or a ``Tree``. Of the state only the drafter's part changes."""
        draft, proposal = self._propose(state, processing_of(state), self._noise(state))
        return state.with_drafter_state(draft), proposal

    def verify(self, state: DecodeState, proposal: Proposal | Tree, allowed=None) -> tuple[DecodeState, RoundLog]:
        """The second half of a round, ``verify_pass`` and ``finish``. Arguments and results as theirs."""
        return self.finish(*self.verify_pass(state, proposal), allowed)

    def verify_pass(self, state: DecodeState, proposal: Proposal | Tree) -> tuple[DecodeState, "VerifyPass"]:
        """Let the target read the newest committed token and the drafts of every row, in one pass.

        The pass has ``width`` query tokens. Those behind the valid drafts of a row, and all of a row that is not live,
        are masked: they write nothing to the cache, and their logits mean nothing.

        Args:
          state: the batch after ``draft``. Only the target's cache changes, and which of its tokens are pending.
          proposal: the drafts.
        """
        request = state.request
        newest = jnp.take_along_axis(state.tokens, request.length[:, None] - 1, axis=1)
        tokens = jnp.concatenate([newest, proposal.tokens], axis=1)
        tokens = jnp.pad(tokens, ((0, 0), (0, self.width - tokens.shape[1])))
        offset = jnp.arange(self.width, dtype=jnp.int32)[None]
        positions = request.length[:, None] - 1 + offset
        valid = state.live[:, None] & (offset <= proposal.count[:, None])
        read = jnp.where(state.live, proposal.count + 1, 0)
        recurrent = None if state.recurrent is None else state.recurrent.begin(state.rows, read)
        tree = proposal.mask(request.length, self.width) if isinstance(proposal, Tree) else None
        rows, view = PagedView(request.table, positions, valid, recurrent=recurrent, tree=tree), None
        if self.budget is None:
            hidden, features, cache = run_target(self.target, self.drafter, tokens, state.cache, rows)
        else:
            view = RaggedView.of(rows, self.budget)
            hidden, features, cache = run_target(self.target, self.drafter, view.from_rows(tokens), state.cache, view)
            features = view.to_rows(features)
        after = None if state.recurrent is None else state.recurrent.advanced(read)
        state = dataclasses.replace(state, cache=cache, recurrent=after)
        return state, VerifyPass(proposal, hidden, features, view)

    def finish(self, state: DecodeState, verified: "VerifyPass", allowed=None) -> tuple[DecodeState, RoundLog]:
        """The end of a round: rule, store features, commit.

        Args:
          state: the batch after ``verify_pass``.
          verified: its other result.
          allowed: uint32 ``[B, width, ceil(V / 32)]``, which tokens may come at each position from ``length`` on if all
            drafts before it stand, as ``Processing`` has it, with K + 1 in place of ``width`` where trees are drafted; None
            allows all.

        Returns:
          the new state, and a log with fields ``[B]``.
        """
        proposal, hidden, features, view = verified
        if isinstance(proposal, Tree):
            return self._finish_tree(state, proposal, self.target.logits(hidden), features, allowed)
        sharding = BatchSharding.of(self.target, hidden)
        local: Any = (lambda tree: tree) if sharding is None else sharding.local_rows
        target: Any = self.target
        logits = target.logits(hidden) if sharding is None else target.batch_sharded_logits(hidden)
        if view is not None:
            logits = view.to_rows(logits)
        # The rule depends on these fields of the rows alone.
        rows = dataclasses.replace(state, tokens=local(state.tokens), request=local(state.request))
        drafts, processing = proposal.by_row(local), dataclasses.replace(processing_of(rows), grammar=local(allowed))
        result = self._apply_rule(rows, processing, logits, drafts)
        if sharding is not None:
            result = sharding.gather_results(result)
        features = next_features(state, features, self.drafter.num_draft_tokens)
        after, log = commit(dataclasses.replace(state, features=features), proposal, result)
        if not self.logprobs:
            return after, log
        logprobs = self._logprobs(processing, rows.request, logits, drafts, local(log.tokens)).packed()
        return after, dataclasses.replace(log, logprobs=logprobs if sharding is None else sharding.all_rows(logprobs))

    def _finish_tree(self, state: DecodeState, tree: Tree, logits, features, allowed) -> tuple[DecodeState, RoundLog]:
        """``finish`` of a tree, whose path that stands ends the round as a chain would."""
        processing, K = dataclasses.replace(processing_of(state), grammar=allowed), self.drafter.num_draft_tokens
        state, path = follow(state, tree, processing, logits, features, self._noise(state), K)
        state = dataclasses.replace(state, features=next_features(state, path.features, K))
        after, log = commit(state, path.drafts, path.result)
        deepest, rejects = (jnp.where(state.live, x, -1) for x in (path.deepest, path.rejects.astype(jnp.int32)))
        log = dataclasses.replace(log, deepest=deepest, rejects=rejects)
        if self.logprobs:
            logprobs = self._logprobs(processing, state.request, path.logits, path.drafts, log.tokens)
            log = dataclasses.replace(log, logprobs=logprobs.packed())
        return after, log

    def _noise(self, state: DecodeState) -> RoundNoise:
        return self.noise(state.request.key_data, state.request.length)

    def decode(self, state: DecodeState, most_rounds: int, rounds=None) -> tuple[DecodeState, CallLogs]:
        """Make ``rounds`` rounds without a host visit, or fewer once no row is live any more.

        Args:
          state: the rows to decode.
          most_rounds: the length of the logs.
          rounds: int32 ``[]``, at most ``most_rounds``; None is that number.

        Returns:
          the new state, and the logs of ``most_rounds`` rounds. A round that was not made has the log of a round in which no
          row took part.
        """
        rounds = most_rounds if rounds is None else rounds
        none = jnp.full(state.request.length.shape, -1, jnp.int32)  # of a row that took no part
        tokens = jnp.full((*none.shape, self.drafter.num_draft_tokens + 1), -1, jnp.int32)
        empty = RoundLog(tokens, jnp.zeros_like(none), *[none] * 5).packed()
        logprobs = jnp.zeros((most_rounds, *tokens.shape, PACKED), jnp.int32) if self.logprobs else None

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
        """``decode`` without drafts; the drafter catches up in one pass at the end.

        This is K = 0 where the engine chooses K. A later round may draft again, so the drafter has to read the tokens that
        were committed meanwhile. Every round adds its feature behind those in the state, for which the array
        ``[B, K + 1, E]`` is widened by ``most_rounds`` during the call.

        Returns:
          the new state, and the logs of rounds with K = 0.
        """
        plain = dataclasses.replace(self, drafter=NoDrafts(self.drafter.aux_layers))
        features = state.features
        if features is not None:
            state = dataclasses.replace(state, features=jnp.pad(features, ((0, 0), (0, most_rounds), (0, 0))))
        state, logs = plain.decode(state, most_rounds, rounds)
        state = self.catch_up(state, self.drafter.num_draft_tokens + 1 + most_rounds)
        if features is not None and state.features is not None:
            state = dataclasses.replace(state, features=state.features[:, : features.shape[1]])
        return state, logs

    def catch_up(self, state: DecodeState, slots: int) -> DecodeState:
        """The batch after the drafter has caught up (``prefill.catch_up``)."""
        return catch_up(self.drafter, state, slots)

    def prefill(self, state: DecodeState, inputs: PrefillInputs) -> DecodeState:
        """The batch after a prefill batch (``prefill.prefill``)."""
        return prefill(self.target, self.drafter, state, inputs, self.expand_latents)[0]

    def prefill_with_logprobs(self, state: DecodeState, inputs: PrefillInputs) -> tuple[DecodeState, jax.Array]:
        """The batch after a prefill batch, and the log-probabilities of the prompt tokens.

        Returns:
          the new state, and ``TokenLogprobs.packed`` of ``inputs.tokens[:, 1:]``, int32 ``[n, c, PACKED]``.
        """
        state, hidden = prefill(self.target, self.drafter, state, inputs, self.expand_latents)
        return state, prompt_logprobs(self.target, hidden, inputs.tokens[:, 1:])

    def room(self, state: DecodeState) -> jax.Array:
        """How many drafts each row may use, int32 ``[B]``: the most that leave a slot for the token that the rule adds.

        They are K, fewer near the end of its S slots or where its request wants fewer, and none if the row is not live.
        """
        request, S = state.request, state.tokens.shape[1]
        room = jnp.minimum(jnp.clip(S - 1 - request.length, 0, self.drafter.num_draft_tokens), request.max_drafts)
        return jnp.where(state.live, room, 0)

    def _propose(self, state: DecodeState, processing: Processing, noise: RoundNoise):
        """Let the drafter propose up to K tokens for each row, and no more than there is ``room`` for.

        So ``count`` is known before any draft is drawn. Drafts past ``count`` are ignored, not rejected; a bonus token
        follows the last counted draft.

        Returns:
          the drafter's new state, and its proposal, with tokens ``[B, K]``.
        """
        request, K = state.request, self.drafter.num_draft_tokens
        context = Context(
            tokens=state.tokens,
            length=request.length,
            previous=state.previous,
            features=None if state.features is None else state.features[:, : K + 1],
            live=state.live,
            room=self.room(state),
            table=request.table,
            warp=request.warp,
            processing=processing,
            noise=noise,
            cache=state.cache,
            row=state.rows if state.has_states else None,
            max_drafts=request.max_drafts,
            chain=None if request.chain is None else request.chain > 0,
        )
        return self.drafter.propose(state.drafter_state, context)

    def _apply_rule(self, state: DecodeState, processing: Processing, logits, proposal: Proposal) -> VerifyResult:
        """The rule's decision under the logits as the requests want them.

        A penalty of 0.1 would be lost in the rounding of bfloat16 logits, so processed logits are float32. A row without
        processors has the same distribution either way.
        """
        if processing.processors is not None:
            logits = as_float32(logits)
        logits = processing.apply(logits, proposal.tokens)
        return self.rule(logits, state.request.warp, proposal, self._noise(state))

    def _logprobs(
        self, processing: Processing, request: RequestArrays, logits, proposal: Proposal, tokens
    ) -> TokenLogprobs:
        """The log-probabilities of the emitted tokens, int32 ``[B, K + 1]``, of each row in its own mode."""
        logits, wanted = logits[:, : tokens.shape[1]], request.processed_logprobs
        if wanted is None:
            return token_logprobs(as_float32(logits), tokens)
        if processing.grammar is not None and request.replays is not None:
            every = ~jnp.uint32(0)  # a given text is one of many, though only its tokens may come
            grammar = jnp.where(request.replays[:, None, None] > 0, every, processing.grammar)
            processing = dataclasses.replace(processing, grammar=grammar)

        def of_both_modes():
            raw = as_float32(logits)
            drawn_from, _ = make_distribution(processing.apply(raw, proposal.tokens), request.warp)
            return jnp.where(wanted[:, None, None] > 0, drawn_from.log_probs, raw)

        # A round makes the distributions if a row wants them. What follows is one computation in both cases, so that the
        # numbers of a row have the same bits beside rows of the other mode.
        of_each = jax.lax.cond(jnp.any(wanted > 0), of_both_modes, lambda: as_float32(logits))
        return token_logprobs(of_each, tokens)


class VerifyPass(NamedTuple):
    """What the target has computed in a verify pass.

    Attributes:
      proposal: the drafts that it has read.
      hidden: hidden states ``[B, width, D]``, of entry i the logits are those of the token at position length + i.
      features: what the drafter reads of the pass, ``[B, width, E]``; None if it reads nothing.
      view: of a pass under a budget of R tokens, whose ``hidden`` is ``[1, R, D]``; else None.
    """

    proposal: Any  # Proposal | Tree
    hidden: jax.Array
    features: Any
    view: RaggedView | None = None
