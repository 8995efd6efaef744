"""The state of the batch on the device: ONE pytree, donated to every program; how requests enter and leave it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import EngineConfig
from jspec.drafting.base import Drafter
from jspec.engine.request import LARGEST, LIVE, STOPPED, Request
from jspec.models.cache import NULL_PAGE, LayerKV, init_pool
from jspec.models.contract import Target
from jspec.sampling.distribution import Warp
from jspec.sampling.params import MAX_STOP_TOKENS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RequestArrays:
    """What a row needs to know of its request: one entry per row, ``[B]``, or that of a single request, ``[]``.

    Attributes:
      length: int32 ``[B]``, how many tokens are committed; when a request enters, the length of its prompt. The
        target's cache holds length - 1 of them: the newest enters it as query token 0 of the next verify pass.
      limit: int32 ``[B]``, the length at which the request is complete.
      min_length: int32 ``[B]``, the first position at which a stop token may stand.
      stop_tokens: int32 ``[B, MAX_STOP_TOKENS]``, padded with -1.
      key_data: uint32 ``[B, 2]``, the request's Threefry key.
      table: int32 ``[B, M]``, its pages, padded with the null page.
      warp: its temperature, top-k, top-p and min-p.
    """

    length: jax.Array
    limit: jax.Array
    min_length: jax.Array
    stop_tokens: jax.Array
    key_data: jax.Array
    table: jax.Array
    warp: Warp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything that a round reads and writes.

    Attributes:
      tokens: int32 ``[B, S]``, the committed tokens of each row, prompt included; what lies past ``length`` means
        nothing.
      outcome: int32 ``[B]``, LIVE while the row decodes. Other rows are masked: they write, draft and emit nothing.
      request: settings and lengths of each row.
      previous: int32 ``[B]``, ``length`` when the row's last round with drafts began. When a request enters, and after
        ``DecodeStep.catch_up``, one less than ``length``.
      cache: the target's pages, one ``LayerKV`` per layer.
      features: ``[B, K + 1, E]`` for the largest K: what the target knew at positions previous - 1, previous, .., as
        its last pass read them, or at the end of the prompt. None if the drafter needs no features.
      draft: the drafter's own state.
    """

    tokens: jax.Array
    outcome: jax.Array
    request: RequestArrays
    previous: jax.Array
    cache: tuple[LayerKV, ...]
    features: jax.Array | None
    draft: Any

    @property
    def live(self) -> jax.Array:
        """bool ``[B]``, the row decodes."""
        return self.outcome == LIVE


def init_state(config: EngineConfig, target: Target, drafter: Drafter, dtype) -> DecodeState:
    """An empty batch: every row is free and every page unwritten."""
    B, S, M = config.max_batch, config.max_len, config.pages_per_row

    def every_row(value, dtype=jnp.int32):  # a buffer of its own each time: a donated buffer may appear only once
        return jnp.full(B, value, dtype)

    request = RequestArrays(
        length=every_row(1),
        limit=every_row(1),
        min_length=every_row(0),
        stop_tokens=jnp.full((B, MAX_STOP_TOKENS), -1, jnp.int32),
        key_data=jnp.zeros((B, 2), jnp.uint32),
        table=jnp.full((B, M), NULL_PAGE, jnp.int32),
        warp=Warp(
            temperature=every_row(0, jnp.float32),
            top_k=every_row(0),
            top_p=every_row(1, jnp.float32),
            min_p=every_row(0, jnp.float32),
        ),
    )
    E = 0 if drafter.aux_layers is None else target.feature_size(drafter.aux_layers)
    return DecodeState(
        tokens=jnp.zeros((B, S), jnp.int32),
        outcome=every_row(STOPPED),
        request=request,
        previous=every_row(0),
        cache=init_pool(target.cache_shape(), config.pool_pages, config.page_size, dtype),
        features=None if drafter.aux_layers is None else jnp.zeros((B, drafter.num_draft_tokens + 1, E), dtype),
        draft=drafter.init(config.pool_pages, config.page_size, dtype),
    )


def padded_prompt(request: Request, config: EngineConfig) -> np.ndarray:
    """The prompt on the host, int32 ``[S]``, followed by zeros."""
    prompt = np.zeros(config.max_len, np.int32)
    prompt[: len(request.prompt)] = request.prompt
    return prompt


def request_arrays(request: Request, config: EngineConfig, table: np.ndarray) -> RequestArrays:
    """What a row needs to know of this one request whose pages are ``table``, int32 ``[M]``.

    The arrays stay on the host: as arguments of a program they need no transfer of their own.
    """
    params, length, S = request.params, len(request.prompt), config.max_len
    stop_tokens = [*request.stop_tokens, *[-1] * (MAX_STOP_TOKENS - len(request.stop_tokens))]

    def array(value, dtype) -> Any:
        return np.asarray(value, dtype)

    return RequestArrays(
        length=array(length, np.int32),
        limit=array(min(length + params.max_tokens, S), np.int32),
        min_length=array(min(length + params.min_tokens, LARGEST[np.int32]), np.int32),
        stop_tokens=array(stop_tokens, np.int32),
        key_data=array(request.key_data, np.uint32),
        table=array(table, np.int32),
        warp=Warp(
            temperature=array(0.0 if params.greedy else params.temperature, np.float32),
            top_k=array(max(params.top_k, 0), np.int32),
            top_p=array(params.top_p, np.float32),
            min_p=array(params.min_p, np.float32),
        ),
    )


def admit(state: DecodeState, row, prompt, request: RequestArrays) -> DecodeState:
    """Let a request whose prompt has been read decode.

    Args:
      state: the batch.
      row: int32 ``[]``, the free row that the request enters.
      prompt: int32 ``[S]``, its tokens.
      request: its settings, of a single request.
    """
    return dataclasses.replace(
        state,
        tokens=state.tokens.at[row].set(prompt),
        outcome=state.outcome.at[row].set(LIVE),
        request=jax.tree.map(lambda rows, value: rows.at[row].set(value), state.request, request),
        previous=state.previous.at[row].set(request.length - 1),
    )


def retire(state: DecodeState, rows) -> DecodeState:
    """Stop rows, bool ``[B]``, that the host found finished: a stop string, a cancelled request."""
    return dataclasses.replace(state, outcome=jnp.where(rows & state.live, STOPPED, state.outcome))
