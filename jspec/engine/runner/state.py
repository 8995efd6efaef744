"""The state of the batch on the device, and how requests are admitted and taken out of it.

The state is ONE pytree. It is donated to every program, which returns a new one in the same memory.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import NULL_PAGE, EngineConfig
from jspec.drafting.base import Drafter
from jspec.drafting.recurrent import DraftRows, RecurrentDraft
from jspec.engine.adaptive.draft_selection import AcceptanceStats, no_stats
from jspec.engine.request import LIVE, STOPPED, Request
from jspec.engine.runner.recurrent import RecurrentRows
from jspec.models.cache_pools import LayerKV, has_states, init_cache
from jspec.models.protocols import Target
from jspec.pallas.collectives.workspace import Exchange
from jspec.pallas.delta_net.state import DeltaState
from jspec.sampling.distribution import Warp
from jspec.sampling.params import MAX_STOP_TOKENS
from jspec.sampling.processors import Processing, Processors


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RequestArrays:
    """The settings and the length of each row's request.

    In ``DecodeState`` the arrays have an axis of rows in front, as given below. ``request_arrays`` makes those of a
    single request, without that axis: ``length`` is then ``[]``.

    Attributes:
      length: int32 ``[B]``, how many tokens are committed. When a request is admitted, that is the length of its prompt. The
        target's cache holds keys and values of all of them but the newest, which is query token 0 of the next verify
        pass.
      limit: int32 ``[B]``, the length at which the request is complete.
      min_length: int32 ``[B]``, the first position at which a stop token may stand.
      stop_tokens: int32 ``[B, MAX_STOP_TOKENS]``, ids of the tokens that end the request, padded with -1.
      key_data: uint32 ``[B, 2]``, the request's Threefry key.
      table: int32 ``[B, M]``, the request's pages in the order of its tokens, padded with the null page. The host decides
        which pages a row has, and gives them to every call: these are those of the last call.
      max_drafts: int32 ``[B]``, the most drafts of a round that the request wants; K and more is as many as there are.
      warp: the request's temperature, top-k, top-p and min-p, each ``[B]``.
      processors: what the request does to logits before that; None where no request does anything.
      replays: int32 ``[B]``, 1 if log-probabilities leave the request's constraint out (``Request.replays``); None where
        none do.
      processed_logprobs: int32 ``[B]``, 1 if the request wants log-probabilities of the distribution that tokens are drawn
        from, 0 if it wants those of the target's own, or none; None where no request wants the former.
      chain: int32 ``[B]``, 1 if the request's drafts are a chain in rounds of trees, because its own tokens decide which may
        follow: it has processors or a constraint; None where no request has.

    Example::

        from jspec.sampling.params import SamplingParams

        request = Request(0, [1, 2, 3], SamplingParams(max_tokens=8, seed=7), np.array([0, 7], np.uint32))
        arrays = request_arrays(request, EngineConfig(max_len=64), vocab_size=32)
        assert arrays.limit == 3 + 8
    """

    length: jax.Array
    limit: jax.Array
    min_length: jax.Array
    stop_tokens: jax.Array
    key_data: jax.Array
    table: jax.Array
    max_drafts: jax.Array
    warp: Warp
    processors: Processors | None = None
    replays: jax.Array | None = None
    processed_logprobs: jax.Array | None = None
    chain: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The arrays that a round reads and writes, apart from weights.

    Attributes:
      tokens: int32 ``[B, S]``, the committed tokens of each row, prompt included. Entries at ``length`` and past it
        mean nothing.
      outcome: int32 ``[B]``, LIVE while the row decodes. Every other row is masked: it drafts, writes and emits nothing.
      request: settings and length of each row's request.
      previous: int32 ``[B]``, ``length`` when the row's last round with drafts began. When a request is admitted, and
        after ``DecodeStep.catch_up``, it is one less than ``length``. Tokens that the drafter has read at positions
        previous - 1 and later may have been its own drafts.
      cache: the target's pages, one ``LayerKV`` for each layer, or None for one that reads another's; a ``DeltaState`` of
        all rows for a layer with a gated delta net.
      features: ``[B, K + 1, E]`` for the largest K, the features of the target that the drafter reads. Entry j belongs to
        position previous - 1 + j, and entries up to position length - 2 mean something. None if the drafter reads no
        features.
      draft: the drafter's own state: a pytree of pools ``[G, pages, P, H]``, as those of the cache, or nothing; with a
        ``DeltaState`` of all rows for each layer of a draft model that has a gated delta net.
      stats_of_request: float32 ``[B, 2, K]`` for the largest K, ``AcceptanceStats.of_request``. None if every draft is
        verified.
      stats_of_confidence: float32 ``[2, BINS]``, ``AcceptanceStats.of_confidence``, of all requests together. None likewise.
      recurrent: of a target with recurrent states, how the next verify pass begins in each row; None of any other.
      draft_rows: of a draft model with recurrent states, which tokens they have read; None of any other drafter.
      row: int32 ``[B]``, in the state of some rows of a batch (``take``), which rows these are; else None.
      exchange: what sums over GPUs are made by; None on one GPU, and where they are XLA's.

    Example::

        def committed_lengths(state: DecodeState):
            return jnp.where(state.live, state.request.length, 0)  # int32 [B]
    """

    tokens: jax.Array
    outcome: jax.Array
    request: RequestArrays
    previous: jax.Array
    cache: tuple[LayerKV | DeltaState | None, ...]
    features: jax.Array | None
    draft: Any
    stats_of_request: jax.Array | None = None
    stats_of_confidence: jax.Array | None = None
    recurrent: RecurrentRows | None = None
    draft_rows: DraftRows | None = None
    row: jax.Array | None = None
    exchange: Exchange | None = None

    @property
    def acceptance_stats(self) -> AcceptanceStats | None:
        """The statistics for estimates of acceptance; None if every draft is verified."""
        if self.stats_of_request is None or self.stats_of_confidence is None:
            return None
        return AcceptanceStats(self.stats_of_request, self.stats_of_confidence)

    @property
    def has_states(self) -> bool:
        """Whether target or drafter keep recurrent states."""
        return self.recurrent is not None or self.draft_rows is not None

    @property
    def drafter_state(self) -> Any:
        """The drafter's state as the drafter takes it."""
        return self.draft if self.draft_rows is None else RecurrentDraft(self.draft, self.draft_rows)

    def with_drafter_state(self, draft: Any) -> "DecodeState":
        """The same after the drafter has returned this state."""
        if isinstance(draft, RecurrentDraft):
            return dataclasses.replace(self, draft=draft.layers, draft_rows=draft.rows)
        return dataclasses.replace(self, draft=draft)

    @property
    def rows(self) -> jax.Array:
        """int32 ``[B]``, the place of each row in recurrent states."""
        return jnp.arange(self.outcome.shape[0], dtype=jnp.int32) if self.row is None else self.row

    @property
    def live(self) -> jax.Array:
        """bool ``[B]``, whether the row decodes."""
        return self.outcome == LIVE


def init_state(
    config: EngineConfig,
    target: Target,
    drafter: Drafter,
    dtype,
    num_rows: int | None = None,
    vocab_size: int | None = None,
    estimates: bool = False,
    width: int | None = None,
) -> DecodeState:
    """An empty batch: every row is free and every page unwritten.

    ``num_rows`` is B; None takes ``config.max_batch``. With ``vocab_size``, V of the target, requests may have processors,
    replay texts, and want processed log-probabilities. With ``estimates``, rounds may verify some of their drafts only.
    ``width`` is the number of query tokens of a row in a verify pass; None takes K + 1.
    """
    B, S, M = num_rows or config.max_batch, config.max_len, config.pages_per_row

    def every_row(value, dtype=jnp.int32):  # a buffer of its own each time: a donated buffer may appear only once
        return jnp.full(B, value, dtype)

    request = RequestArrays(
        length=every_row(1),
        limit=every_row(1),
        min_length=every_row(0),
        stop_tokens=jnp.full((B, MAX_STOP_TOKENS), -1, jnp.int32),
        key_data=jnp.zeros((B, 2), jnp.uint32),
        table=jnp.full((B, M), NULL_PAGE, jnp.int32),
        max_drafts=every_row(S),
        warp=Warp(
            temperature=every_row(0, jnp.float32),
            top_k=every_row(0),
            top_p=every_row(1, jnp.float32),
            min_p=every_row(0, jnp.float32),
        ),
        processors=None if vocab_size is None else Processors.none(B, vocab_size),
        replays=None if vocab_size is None else every_row(0),
        processed_logprobs=None if vocab_size is None else every_row(0),
        chain=None if vocab_size is None else every_row(0),
    )
    stats = no_stats(B, drafter.num_draft_tokens) if estimates else None
    width = drafter.num_draft_tokens + 1 if width is None else width
    E = 0 if drafter.aux_layers is None else target.feature_size(drafter.aux_layers)
    state = DecodeState(
        tokens=jnp.zeros((B, S), jnp.int32),
        outcome=every_row(STOPPED),
        request=request,
        previous=every_row(0),
        cache=init_cache(target.cache_shape(), config.pool_pages, config.page_size, B, width, dtype),
        features=None if drafter.aux_layers is None else jnp.zeros((B, drafter.num_draft_tokens + 1, E), dtype),
        draft=(),
        stats_of_request=None if stats is None else stats.of_request,
        stats_of_confidence=None if stats is None else stats.of_confidence,
        recurrent=RecurrentRows(every_row(0), every_row(0)) if has_states(target.cache_shape()) else None,
    )
    return state.with_drafter_state(drafter.init(config.pool_pages, config.page_size, dtype, B))


def with_processors(state: DecodeState, processors: Processors | None) -> DecodeState:
    """The batch with these processors; None is for programs without processors."""
    return dataclasses.replace(state, request=dataclasses.replace(state.request, processors=processors))


def processing_of(state: DecodeState) -> Processing:
    """How the round of a batch processes logits."""
    request = state.request
    return Processing(
        processors=request.processors,
        stop_tokens=request.stop_tokens,
        min_length=request.min_length,
        tokens=state.tokens,
        length=request.length,
    )


OF_ROWS = ("tokens", "outcome", "request", "previous", "features", "stats_of_request", "recurrent", "draft_rows")


def of_rows(state: DecodeState) -> dict[str, Any]:
    """Every array of the state that has an axis of rows in front, by field."""
    return {name: getattr(state, name) for name in OF_ROWS}


class Admission(NamedTuple):
    """A request to admit.

    Attributes:
      row: a free row.
      request: what was asked for.
      prefix: the committed tokens: its prompt, and those of its completion that it has already.
    """

    row: int
    request: Request
    prefix: Sequence[int]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdmitInputs:
    """Requests to admit, in arrays on the host.

    Attributes:
      row: int32 ``[n]``, the row of each; B, which is no row, fills up the number.
      prefix: int32 ``[n, S]``, their committed tokens, followed by zeros.
      request: the row arrays of each request, with an axis of n in front.
    """

    row: Any
    prefix: Any
    request: RequestArrays

    @staticmethod
    def of(config: EngineConfig, vocab_size: int, most: int, requests: Sequence[Admission]) -> "AdmitInputs":
        """At most ``most`` requests. ``vocab_size`` is V of the target."""
        row = np.full(most, config.num_rows, np.int32)
        row[: len(requests)] = [row for row, *_ in requests]
        prefixes = np.zeros((most, config.max_len), np.int32)
        for place, (*_, prefix) in enumerate(requests):
            prefixes[place, : len(prefix)] = prefix
        arrays = [request_arrays(one.request, config, vocab_size, len(one.prefix)) for one in requests]

        def stacked(*values):
            return np.stack([*values, *[np.zeros_like(values[0])] * (most - len(values))])

        return AdmitInputs(row, prefixes, jax.tree.map(stacked, *arrays))


def request_arrays(
    request: Request, config: EngineConfig, vocab_size: int, num_committed: int | None = None
) -> RequestArrays:
    """The row arrays of one request, on the host.

    They stay on the host because an argument of a program needs no transfer of its own.

    Args:
      request: the request to admit.
      config: its ``max_len`` bounds the text, and its ``logprobs_mode`` is that of requests without one.
      vocab_size: V of the target.
      num_committed: how many tokens are committed; None for those of the prompt.
    """
    params, length, S = request.params, len(request.prompt), config.max_len
    stop_tokens = [*request.stop_tokens, *[-1] * (MAX_STOP_TOKENS - len(request.stop_tokens))]
    mode = None if params.logprobs is None else params.logprobs_mode or config.logprobs_mode

    def array(value, dtype) -> Any:
        return np.asarray(value, dtype)

    return RequestArrays(
        length=array(length if num_committed is None else num_committed, np.int32),
        limit=array(request.limit(S), np.int32),
        min_length=array(length + params.min_tokens, np.int32),
        stop_tokens=array(stop_tokens, np.int32),
        key_data=array(request.key_data, np.uint32),
        table=array([NULL_PAGE] * config.pages_per_row, np.int32),
        max_drafts=array(request.max_drafts, np.int32),
        warp=Warp(
            temperature=array(0.0 if params.greedy else params.temperature, np.float32),
            top_k=array(max(params.top_k, 0), np.int32),
            top_p=array(params.top_p, np.float32),
            min_p=array(params.min_p, np.float32),
        ),
        processors=Processors.of(params, length, vocab_size, request.bad_words),
        replays=array(request.replays, np.int32),
        processed_logprobs=array(mode == "processed_logprobs", np.int32),
        chain=array(params.processes_logits or request.constraint is not None, np.int32),
    )


def admit(rows: dict[str, Any], inputs: AdmitInputs) -> dict[str, Any]:
    """Put requests into free rows, so that the next round decodes them. Their prompts have been prefilled.

    Args:
      rows: the part of the state that has rows, ``of_rows(state)``.
      inputs: the requests, and the free row of each.

    Returns:
      that part of the new state.
    """
    at, request, stats = inputs.row, inputs.request, rows["stats_of_request"]
    recurrent, begun = rows["recurrent"], RecurrentRows.of_admitted(request.length)
    draft_rows = rows["draft_rows"]
    put_in = functools.partial(jax.tree.map, lambda x, new: x.at[at].set(new, mode="drop"))
    return rows | {
        "tokens": rows["tokens"].at[at].set(inputs.prefix, mode="drop"),
        "outcome": rows["outcome"].at[at].set(LIVE, mode="drop"),
        "request": put_in(rows["request"], request),
        "previous": rows["previous"].at[at].set(request.length - 1, mode="drop"),
        "stats_of_request": None if stats is None else stats.at[at].set(0.0, mode="drop"),
        "recurrent": None if recurrent is None else put_in(recurrent, begun),
        "draft_rows": draft_rows
        and put_in(draft_rows, DraftRows.of_admitted(request.length, draft_rows.tokens.shape[1])),
    }


def take(state: DecodeState, rows, table) -> DecodeState:
    """The state of b of the rows, with the pages of the whole batch.

    Args:
      state: the batch.
      rows: int32 ``[b]``, the rows. B stands for no row, so that a program for b rows can decode fewer.
      table: int32 ``[b, M]``, the pages of each row, which take the place of those in ``state``.
    """
    fields = jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode="clip"), of_rows(state))
    fields["outcome"] = jnp.where(rows < state.outcome.shape[0], fields["outcome"], STOPPED)
    fields["request"] = dataclasses.replace(fields["request"], table=table)
    return dataclasses.replace(state, **fields, row=rows)


def put(state: DecodeState, rows, taken: DecodeState) -> DecodeState:
    """The batch after ``taken``, which began as ``take(state, rows, table)``, has made its rounds."""
    return dataclasses.replace(taken, **put_rows(of_rows(state), rows, of_rows(taken)), row=None)


def put_rows(arrays: Any, rows, new: Any) -> Any:
    """A pytree of arrays ``[B, ...]`` with ``new`` in these rows, int32; those out of range are left out."""
    return jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), arrays, new)
