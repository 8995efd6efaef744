"""EAGLE, EAGLE-2 and EAGLE-3 draft heads as drafters.

The first pass of a round reads features of the target. K - 1 passes over the draft head's own outputs follow.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jspec.config import Speculation
from jspec.drafting.base import Context, Prompt, Setup
from jspec.drafting.drawing import Drawn
from jspec.drafting.window import make_window
from jspec.models.cache_pools import init_pool
from jspec.models.kv_cache import PagedView
from jspec.models.protocols import DraftHead, Target


@dataclasses.dataclass(frozen=True)
class CachedHead(Drawn):
    """A draft head with decoder layers, which caches keys and values of its own.

    Attributes:
      head: the draft head.
      target: the target, whose embedding and output head the draft head may borrow.
      aux_layers: the auxiliary hidden states that a feature joins, as ``Target.with_auxiliary`` takes them.
      speculation: K, and how drafts are drawn.
    """

    head: Any
    target: Target
    aux_layers: tuple[int, ...]
    speculation: Speculation

    @classmethod
    def build(cls, setup: Setup):
        config: Any = setup.config
        aux_layers = config.resolved_aux_layers(setup.target_config)
        return cls(setup.draft, setup.target, aux_layers, setup.speculation)

    @property
    def max_position(self) -> int:
        return self.head.config.layers.max_position

    def init(self, pages: int, page_size: int, dtype, num_rows: int):
        return init_pool(self.head.cache_shape(), pages, page_size, dtype)


@dataclasses.dataclass(frozen=True)
class Eagle(CachedHead):
    """A draft head whose slot i reads feature i of the target and token i + 1 (Li et al., 2024 and 2025).

    The first pass of a round reads a window: the slots of the tokens that the last round committed. The target has
    computed their features by now, so the window replaces cache entries that the last round made from the draft head's
    own outputs. The newest token has no feature yet. After a prompt of one token, the first round drafts nothing.
    """

    head: DraftHead

    slots_beyond = 0

    @property
    def longest_text(self) -> int:
        return self.max_position + 1  # the first draft of a round needs slot length - 2

    def prefill(self, state, prompt: Prompt):
        view = prompt.view_before(self.max_position)
        embedded, features = self.head.embed(prompt.following, self.target), self.head.fuse(prompt.features)
        return self.head(embedded, features, view.positions, state, view)[1]

    def room(self, context: Context):
        """How many drafts each row may use, one behind the other, int32 ``[B]``."""
        newest = context.length - 2  # the newest slot whose feature the target has computed
        # Draft i is drawn after slot newest + i, so the draft head must have that position.
        return jnp.where(newest >= 0, context.room_within(self.max_position - newest), 0)

    def read_window(self, state, context: Context):
        """The first pass: the hidden state of the newest slot whose feature the target has computed, ``[B, 1, D]``, and the
        cache."""
        first, end = context.previous - 1, context.length - 1
        window = make_window(context, first, end, self.num_draft_tokens, 0, self.max_position)
        embedded = self.head.embed(context.tokens_at(window.positions + 1), self.target)
        features = self.head.fuse(context.features)
        hidden, cache = self.head(embedded, features, window.positions, state, window.view(context))
        return window.after_newest(hidden, 1), cache

    def propose(self, state, context: Context):
        newest, room = context.length - 2, self.room(context)
        hidden, cache = self.read_window(state, context)

        def next_pass(carry, token, i):
            hidden, cache = carry
            positions = newest[:, None] + i
            view = PagedView(context.table, positions, (i < room)[:, None])
            embedded = self.head.embed(token, self.target)
            hidden, cache = self.read(i, embedded, self.head.recycle(hidden), positions, cache, view)
            return (hidden, cache), self.head.logits(hidden, self.target)

        logits = self.head.logits(hidden, self.target)
        (_, cache), proposal = self.drawing(context).chain(logits, (hidden, cache), next_pass, room, self.passes_differ)
        return cache, proposal

    @property
    def passes_differ(self) -> bool:
        """Whether each pass over the draft head's own outputs has weights of its own: see ``Drawing.chain``."""
        return False

    def read(self, i, embedded, features, positions, cache, view):
        """The pass that reads draft i - 1: the hidden state of its slot ``[B, 1, D]``, and the cache. Arguments are those of
        the draft head (``jspec.models.protocols.DraftHead``), with T = 1."""
        del i
        return self.head(embedded, features, positions, cache, view)
