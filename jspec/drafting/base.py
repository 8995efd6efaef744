"""The protocol of a drafter, and its inputs.

A drafter is built inside the trace of a compiled program, from its modules and settings. ``init`` makes its state, a
pytree that lives in ``DecodeState.draft``. ``prefill`` and ``propose`` take that state and return it updated.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import ModelConfig, Speculation
from jspec.config.heads import DraftConfig
from jspec.models.kv_cache import PagedView
from jspec.models.protocols import Target
from jspec.sampling.distribution import Warp
from jspec.sampling.processors import Processing
from jspec.sampling.streams import RoundNoise
from jspec.sampling.tree import Tree
from jspec.sampling.verify import Proposal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FixedDrafts:
    """Drafts that are not the drafter's own: jump-forward tokens of a grammar, or looked-up tokens.

    They are point masses. The verification rule treats them as any other draft.

    Attributes:
      tokens: int32 ``[B, K]``.
      count: int32 ``[B]``, how many of them there are; they are the first drafts of the row.

    Example::

        fixed = FixedDrafts(tokens=jnp.array([[5, 7, 0]]), count=jnp.array([2]))  # K = 3, two are known
    """

    tokens: Any
    count: Any

    @staticmethod
    def of(rows: int, K: int, drafts: Sequence[Sequence[int]] = ()) -> "FixedDrafts":
        """The drafts of each row, at most K, in arrays on the host; rows behind the last of them have none."""
        tokens, count = np.zeros((rows, K), np.int32), np.zeros(rows, np.int32)
        for i, some in enumerate(drafts):
            tokens[i, : len(some)], count[i] = some, len(some)
        return FixedDrafts(tokens, count)

    def put_into(self, proposal: Proposal | Tree, room) -> Proposal | Tree:
        """The proposal with these drafts as the first ones of each row, as many as there is room for. A row of trees that
        gets some has a chain.

        The drafter has drawn its later drafts as continuations of its own first ones. They stay behind fixed drafts that
        equal those. Otherwise they continue another text and would hardly be accepted, so that the fixed ones are the only
        drafts. Which of the two depends on no draft that stays: in either case those were drawn from the distributions
        beside them.

        Args:
          proposal: of the drafter.
          room: int32 ``[B]``, as ``Context.room``.
        """
        count, n = jnp.minimum(self.count, room), proposal.tokens.shape[1]
        tokens = jnp.pad(self.tokens, ((0, 0), (0, n - self.tokens.shape[1])))
        fixed = jnp.arange(n, dtype=jnp.int32)[None] < count[:, None]
        continued = jnp.all(~fixed | (proposal.tokens == tokens), axis=1) & (proposal.count >= count)
        count = jnp.where(continued, proposal.count, count)
        return proposal.beginning_with(jnp.where(fixed, tokens, proposal.tokens), count, fixed)


class Text(NamedTuple):
    """The committed tokens of some rows.

    Attributes:
      tokens: int32 ``[B, S]``. Entries at ``length`` and later mean nothing.
      length: int32 ``[B]``, the number of committed tokens.
      row: int32 ``[B]``, the place of each row in recurrent states. As many as there are rows stands for no row. None where
        no drafter reads it.

    Example::

        text = Text(jnp.array([[5, 7, 9, 0]]), length=jnp.array([3]), row=jnp.array([0]))
        assert text.tokens_at(text.length[:, None] - 1).tolist() == [[9]]
    """

    tokens: jax.Array
    length: jax.Array
    row: jax.Array | None = None

    def tokens_at(self, positions) -> jax.Array:
        """Committed tokens at int32 positions ``[B, J]``, int32 ``[B, J]``.

        A position outside the text gives an arbitrary token, which the caller must mask.
        """
        return jnp.take_along_axis(self.tokens, jnp.clip(positions, 0, self.tokens.shape[1] - 1), axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """The inputs of a drafter in a round, one entry for each row.

    Attributes:
      tokens: int32 ``[B, S]``, the committed tokens. Entries at ``length`` and later mean nothing.
      length: int32 ``[B]``, the number of committed tokens.
      previous: int32 ``[B]``, the number of committed tokens when the row's last round with drafts began. Before the
        first round it is one less than the length of the prompt.
      features: ``[B, K + 1, E]``, the target's features at positions previous - 1, previous, .., previous + K - 1. Those
        past position length - 2 mean nothing. None if the drafter reads no features.
      live: bool ``[B]``, whether the row is decoding a request.
      room: int32 ``[B]`` in 0..K, the largest number of drafts that the row can use. 0 for a row that is not live.
      table: int32 ``[B, M]``, the pages of each row. Target and drafter use the same pages, each in its own pool.
      warp: the sampling settings of each request, such as its temperature.
      processing: changes of each request's logits before the temperature, stop tokens that come too early included.
      noise: the noise of the round, which is the only noise that a drafter may draw with.
      fixed: drafts that take the place of the drafter's own, which it continues; None if no row has any.
      cache: the target's keys and values, one entry for each layer (``DecodeState.cache``), valid in slots 0 .. length - 2
        of a row. A drafter may read them, and never writes.
      row: int32 ``[B]``, the place of each row in recurrent states; None where no drafter reads it.
      max_drafts: int32 ``[B]``, the most drafts that the row's request wants; ``room`` is no more, and a tree has no more.
      chain: bool ``[B]``, whether the row's drafts have to be a chain; None where none have to. Only trees look at it.

    Example::

        def newest_tokens(context: Context):
            return context.tokens_at(context.length[:, None] - 1)  # int32 [B, 1]
    """

    tokens: jax.Array
    length: jax.Array
    previous: jax.Array
    features: jax.Array | None
    live: jax.Array
    room: jax.Array
    table: jax.Array
    warp: Warp
    processing: Processing
    noise: RoundNoise
    fixed: FixedDrafts | None = None
    cache: Any = None
    row: jax.Array | None = None
    max_drafts: Any = None
    chain: Any = None

    @property
    def text(self) -> Text:
        """The committed tokens."""
        return Text(self.tokens, self.length, self.row)

    def tokens_at(self, positions) -> jax.Array:
        """As ``Text.tokens_at``."""
        return self.text.tokens_at(positions)

    def room_within(self, limit) -> jax.Array:
        """``room``, but at most the drafter's own ``limit``, int32 ``[B]``. A negative limit counts as 0."""
        return jnp.minimum(self.room, jnp.maximum(limit, 0))

    def with_fixed(self, drafts, first=0) -> jax.Array:
        """Drafts ``first``, ``first + 1``, .. of each row, int32 ``[B, J]``, with the fixed ones in place of the drafter's.

        ``first`` is an integer, of Python's or int32 ``[]``.
        """
        if self.fixed is None:
            return drafts
        index = first + jnp.arange(drafts.shape[1], dtype=jnp.int32)
        fixed = jnp.take(self.fixed.tokens, index, axis=1, mode="clip")
        return jnp.where(index[None] < self.fixed.count[:, None], fixed, drafts)

    def fixed_among(self, drafts) -> jax.Array:
        """Which of all K drafts of each row are fixed, bool ``[B, K]``."""
        if self.fixed is None:
            return jnp.zeros(drafts.shape, bool)
        return jnp.arange(drafts.shape[1], dtype=jnp.int32)[None] < self.fixed.count[:, None]

    @property
    def newest_feature(self) -> jax.Array:
        """The feature at position length - 2, ``[B, 1, E]``. It is the newest one that the target has computed."""
        assert self.features is not None
        return jnp.take_along_axis(self.features, (self.length - 1 - self.previous)[:, None, None], axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompt:
    """C tokens of the prompt of each row, which the target has just read.

    Attributes:
      tokens: int32 ``[B, C]``.
      following: int32 ``[B, C]``, the token after each of them.
      features: ``[B, C, E]``, the target's feature at each of them. None if the drafter reads no features.
      view: the positions of the tokens, and the pages to which their keys and values go.
      text: where the tokens are no prompt's, and the drafter may have read some of them already, the texts that they end but
        for the newest token (``engine.runner.prefill.catch_up``); else None.

    Example::

        def lengths(prompt: Prompt):
            return jnp.sum(prompt.view.valid, axis=1)  # int32 [B], how many of the C tokens each row has
    """

    tokens: jax.Array
    following: jax.Array
    features: jax.Array | None
    view: PagedView
    text: Text | None = None

    def view_before(self, max_position: int) -> PagedView:
        """``view`` without the tokens at positions that a drafter does not have: these are not read."""
        return dataclasses.replace(self.view, valid=self.view.valid & (self.view.positions < max_position))


@dataclasses.dataclass(frozen=True)
class Setup:
    """The parts that a drafter is built from, inside a trace.

    Attributes:
      config: config of the draft model or draft head. None for a method that has no checkpoint.
      target_config: config of the target.
      target: module of the target.
      draft: module of the draft model or draft head, or the arrays that the method's ``prepare`` made. None if the method
        has neither.
      speculation: the settings of speculation: K (``most_draft_tokens``), and how drafts are drawn.

    Example::

        def build(setup: Setup):
            print(setup.speculation.most_draft_tokens, setup.target.feature_size(()))
    """

    config: DraftConfig | None
    target_config: ModelConfig
    target: Target
    draft: Any
    speculation: Speculation


class Drafter(Protocol):
    """A way of proposing tokens: a frozen dataclass with these members.

    Example::

        def greedy_drafts(drafter: Drafter, state, context: Context):
            state, proposal = drafter.propose(state, context)
            return state, proposal.tokens  # int32 [B, K], of which proposal.count count
    """

    @classmethod
    def build(cls, setup: Setup) -> Self:
        """Build the drafter from its parts."""
        ...

    @property
    def num_draft_tokens(self) -> int:
        """K, the largest number of drafts in a round."""
        ...

    @property
    def aux_layers(self) -> tuple[int, ...] | None:
        """The hidden states of the target that the drafter reads, as ``Target.with_auxiliary`` takes them.

        ``()`` is the hidden state after the final norm. None means that the drafter reads no features.
        """
        ...

    @property
    def longest_text(self) -> int | None:
        """Length of the longest text after which the drafter can still draft, in tokens.

        Beyond it the drafter has no positions. None if it has no such limit.
        """
        ...

    @property
    def slots_beyond(self) -> int:
        """How many cache slots a round may write behind those that the target writes, which are those of K drafts."""
        ...

    def init(self, pages: int, page_size: int, dtype, num_rows: int) -> Any:
        """An empty state. A drafter that caches keys and values makes pools of ``pages`` pages of ``page_size`` slots. One
        with recurrent states has one for each of ``num_rows`` rows."""
        ...

    def prefill(self, state: Any, prompt: Prompt) -> Any:
        """Read C tokens of the prompt of each row; returns the new state."""
        ...

    def propose(self, state: Any, context: Context) -> tuple[Any, Proposal]:
        """Draft up to ``context.room`` tokens in each row; returns the new state and the drafts."""
        ...


class Stateless:
    """The members that are the same in every drafter that keeps nothing between rounds.

    Example::

        from jspec.drafting.ngram import copied

        @dataclasses.dataclass(frozen=True)
        class Repeat(Stateless):  # proposes the newest token K times
            num_draft_tokens: int

            @classmethod
            def build(cls, setup: Setup):
                return cls(setup.speculation.most_draft_tokens)

            def propose(self, state, context: Context):
                newest = context.tokens_at(context.length[:, None] - 1)
                return state, copied(jnp.repeat(newest, self.num_draft_tokens, axis=1), context.room, context)
    """

    aux_layers: tuple[int, ...] | None = None
    longest_text = None
    slots_beyond = 0

    def init(self, pages: int, page_size: int, dtype, num_rows: int) -> tuple[()]:
        """The empty state."""
        del pages, page_size, dtype, num_rows
        return ()

    def prefill(self, state, prompt: Prompt):
        """Return the state unchanged: the committed tokens are in the context of every round."""
        del prompt
        return state
