"""Drafting with a smaller language model of the target's vocabulary: K passes, one token each."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec.cache import PagedView, init_pool
from jspec.config import Speculation
from jspec.drafting.base import Context
from jspec.pallas.residual import Rows
from jspec.sampling.law import Law, Warp, leading, make_law
from jspec.sampling.params import GREEDY_BELOW
from jspec.sampling.stops import forbid_early_stops
from jspec.sampling.verify import Proposal

UNROLLED_PASSES = 8  # straight-line passes let one device graph hold the round; past that, compile time matters more


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """A causal language model that proposes tokens.

    The first pass of a round reads the two newest committed tokens: after a round that accepted everything, the last
    draft has not been read yet. Reading a token again rewrites its keys and values with the same numbers.

    Attributes:
      model: a ``Decoder`` or its like.
      vocab_size: V of the target. A wider draft vocabulary is cut to it, a narrower one gives no mass past its end.
      speculation: K and how tokens are drawn.
    """

    model: Any
    vocab_size: int
    speculation: Speculation

    @property
    def num_draft_tokens(self) -> int:
        return self.speculation.num_draft_tokens

    def init(self, pages: int, page_size: int, dtype):
        return init_pool(self.model.cache_shape(), pages, page_size, dtype)

    def prefill(self, state, tokens, view: PagedView):
        inside = view.positions < self.model.config.max_position
        view = dataclasses.replace(view, valid=view.valid & inside)
        return self.model(tokens, view.positions, state, view)[1]

    def propose(self, state, context: Context):
        K = self.num_draft_tokens
        # The pass that draws d_i reads position length - 1 + i, which must be one the draft model has.
        own_room = jnp.maximum(self.model.config.max_position - context.length + 1, 0)
        room = jnp.minimum(context.room, own_room)
        warp = self._draft_warp(context.warp)

        positions = context.length[:, None] + jnp.arange(-2, 0, dtype=jnp.int32)[None]
        window = jnp.take_along_axis(context.tokens, jnp.maximum(positions, 0), axis=1)
        logits, cache = self._read(state, window, positions, (positions >= 0) & (room > 0)[:, None], context)
        first = self._draw(logits, 0, warp, context)

        def next_pass(carry, i):
            token, cache = carry
            position = context.length[:, None] - 1 + i
            logits, cache = self._read(cache, token, position, (i < room)[:, None], context)
            law, token = self._draw(logits, i, warp, context)
            return (token, cache), (law, token)

        later = jnp.arange(1, K, dtype=jnp.int32)
        (_, cache), rest = jax.lax.scan(next_pass, (first[1], cache), later, unroll=min(max(K - 1, 1), UNROLLED_PASSES))
        rows, tokens = jax.tree.map(
            lambda one, more: jnp.concatenate([one, jnp.moveaxis(more[:, :, 0], 0, 1)], axis=1),
            (first[0].rows, first[1]),
            (rest[0].rows, rest[1]),
        )
        law = Law(Rows(*rows), warp.greedy)
        return cache, Proposal(tokens, jnp.minimum(room, leading(law.finite)), law, point_mass=warp.greedy)

    def _read(self, cache, tokens, positions, valid, context: Context):
        """Read tokens and return the logits after the last one, ``[B, 1, V]``, and the cache."""
        hidden, cache = self.model(tokens, positions, cache, PagedView(context.table, positions, valid))
        return self.model.logits(hidden[:, -1:])[..., : self.vocab_size], cache

    def _draw(self, logits, i, warp: Warp, context: Context) -> tuple[Law, jax.Array]:
        """The law of draft i and a token from it, int32 ``[B, 1]``."""
        index = jnp.full((logits.shape[0], 1), i, jnp.int32)
        logits = forbid_early_stops(logits, context.length[:, None] + index, context.stop_tokens, context.min_length)
        coupled = self.speculation.draft_sampling == "coupled"
        keys = context.noise.sample_keys(index) if coupled else context.noise.draft_keys(index)
        return make_law(logits, warp, keys)

    def _draft_warp(self, warp: Warp) -> Warp:
        """The request's settings at the draft's temperature; 0 makes the draft an argmax, that is, a point mass."""
        how, fixed = self.speculation, self.speculation.draft_temperature
        temperature = warp.temperature
        if fixed is not None:
            temperature = jnp.full_like(temperature, 0.0 if fixed < GREEDY_BELOW else fixed)
        if how.draft_sampling == "argmax":
            temperature = jnp.zeros_like(temperature)
        elif how.draft_sampling == "auto":
            temperature = jnp.where(warp.temperature < how.argmax_below, 0.0, temperature)
        return dataclasses.replace(warp, temperature=temperature)
