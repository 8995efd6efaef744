"""The state of a batch in flight: ONE pytree, donated to every program, and how requests enter and leave it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec.config import EngineConfig
from jspec.drafting.base import Drafter
from jspec.models.cache import NULL_PAGE, LayerKV, init_pool
from jspec.models.contract import Target
from jspec.sampling.distribution import Warp
from jspec.sampling.params import MAX_STOP_TOKENS

LIVE, STOPPED, FULL, BROKEN = range(4)  # outcome of a row: still running, stop token, length limit, non-finite logits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RequestArrays:
    """What a row needs to know of its request; ``[B]`` stands for one entry per row, or nothing for a single request.

    Attributes:
      length: int32 ``[B]``, committed tokens. The target's cache holds length - 1 of them: the newest enters it as row
        0 of the next verify pass. When a request enters, its prompt.
      limit: int32 ``[B]``, the length at which the request is complete.
      min_length: int32 ``[B]``, no stop token at a position below this.
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
      tokens: int32 ``[B, S]``, committed tokens of each row, prompt included; what lies past ``length`` means nothing.
      outcome: int32 ``[B]``, LIVE while the row decodes. Other rows are masked: they write, draft and emit nothing.
      request: per-row settings and lengths.
      previous: int32 ``[B]``, length when the row's last round with drafts began; when a request enters, and after
        ``DecodeStep.catch_up``, one less than ``length``.
      cache: the target's pages, one ``LayerKV`` per layer.
      features: ``[B, K + 1, E]`` for the largest K, what the target knew at positions previous - 1, previous, ..: what
        the last round read, or the end of the prompt. None if the drafter needs none.
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
        return self.outcome == LIVE


def init_state(config: EngineConfig, target: Target, drafter: Drafter, dtype) -> DecodeState:
    """An empty batch: every row free, every page unwritten."""
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


def admit(state: DecodeState, row, prompt, request: RequestArrays) -> DecodeState:
    """Put a prefilled request in a free row: row int32 ``[]``, prompt int32 ``[S]``, fields of ``request``
    unbatched."""
    return dataclasses.replace(
        state,
        tokens=state.tokens.at[row].set(prompt),
        outcome=state.outcome.at[row].set(LIVE),
        request=jax.tree.map(lambda rows, value: rows.at[row].set(value), state.request, request),
        previous=state.previous.at[row].set(request.length - 1),
    )


def retire(state: DecodeState, rows) -> DecodeState:
    """Stop rows that the host found finished (a stop string, a cancelled request): bool ``[B]``."""
    return dataclasses.replace(state, outcome=jnp.where(rows & state.live, STOPPED, state.outcome))
