"""Block drafters: DFlash, DFlash2, JetSpec, DSpark and XPress. One pass computes the hidden states of all drafts."""

import dataclasses

import jax
import jax.numpy as jnp

from jspec.drafting.base import Context, Prompt
from jspec.drafting.drawing import Drawing
from jspec.drafting.eagle import CachedHead
from jspec.drafting.window import make_window
from jspec.models.heads.block import BlockHead, BlockView
from jspec.sampling.verify import Proposal


@dataclasses.dataclass(frozen=True)
class Block(CachedHead):
    """A draft head that fills a block of mask tokens behind the newest token (DFlash, DFlash2, JetSpec, DSpark and
    XPress, 2026).

    The pass of a round caches the context of the tokens that the last round committed, whose features the target has
    computed by now, and reads the block behind them. The block begins with the newest committed token, which has no feature
    yet. After a prompt of one token there is no context, and the first round drafts nothing.

    A head whose slots see all others was trained for blocks of one size: it always has that many slots, of which a smaller K
    draws the first. The drafts of a DFlash or JetSpec head do not see each other, as in ``drafting.parallel``. Those of a
    DSpark head are drawn one after another, and so are those of a DFlash2 head, each among the likeliest tokens of its slot.
    Those of an XPress head are the likeliest tokens after its last pass, at any temperature, as its passes were trained.
    """

    head: BlockHead

    @property
    def longest_text(self) -> int:
        return self.max_position - self.first  # the first draft of a round needs slot length - 1 + first

    @property
    def first(self) -> int:
        """The slot of the block that makes the first draft."""
        return 0 if self.head.config.anchor_first else 1

    @property
    def slots(self) -> int:
        """n, the slots of a block. Slots behind the last draft matter only where slots attend to later ones."""
        config = self.head.config
        whole = config.refiner_rank or not all(config.causal)  # the refiner of an XPress head reads the mean of a block
        return config.block_size if whole else self.first + self.num_draft_tokens

    @property
    def slots_beyond(self) -> int:
        return max(self.slots - 1 - self.num_draft_tokens, 0)

    def prefill(self, state, prompt: Prompt):
        view = prompt.view_before(self.max_position)
        return self.head.write_kv(self.head.fuse(prompt.features), view.positions, state, view)

    def propose(self, state, context: Context):
        drawing, anchor, K = self.drawing(context), context.length - 1, self.num_draft_tokens
        # Draft i is made by the slot at anchor + first + i, so the draft head must have that position.
        room = jnp.where(anchor > 0, context.room_within(self.max_position - anchor - self.first), 0)
        block, cache, valid = self._read(state, context)
        hidden = block[:, self.first : self.first + K]
        logits, newest = self.head.draft_logits(hidden, self.target), context.tokens_at(anchor[:, None])
        if self.head.selector is not None:
            proposal = self._selected(drawing, hidden, logits, newest, room)
        elif self.head.refiner is not None:
            proposal = self._refined(drawing, self.head.refiner.inputs(block, valid), logits, context, room)
        elif self.head.markov is not None:
            proposal = self._sequential(drawing, hidden, logits, newest, room)
        else:
            proposal = drawing.at_once(logits, room)
        return cache, self._with_confidence(proposal, hidden, newest)

    def _with_confidence(self, proposal: Proposal, hidden, anchor) -> Proposal:
        """The proposal with the confidence head's output for each draft, from its slot and the draft before it."""
        if self.head.confidence is None:
            return proposal
        previous = jnp.concatenate([anchor, proposal.tokens[:, :-1]], axis=1)
        confidence = jax.nn.sigmoid(self.head.confidence_logits(hidden, previous))
        return dataclasses.replace(proposal, confidence=confidence)

    def _read(self, state, context: Context):
        """The pass: hidden states ``[B, n, D]``, after the final norm, the cache, and bool ``[B, n]``, which slots have a
        position."""
        config, anchor, n = self.head.config, context.length - 1, self.slots
        window = make_window(context, context.previous - 1, anchor, self.num_draft_tokens, 0, self.max_position)
        places = anchor[:, None] + jnp.arange(n, dtype=jnp.int32)[None]
        known = context.live[:, None] & (places < min(self.max_position, context.tokens.shape[1]))
        positions = jnp.concatenate([window.positions, places], axis=1)
        view = BlockView(context.table, positions, jnp.concatenate([window.valid, known], axis=1), block=n)
        block = jnp.where(places == anchor[:, None], context.tokens_at(places), config.mask_token_id)
        fused, embedded = self.head.fuse(context.features), self.head.embed(block, self.target)
        return *self.head(fused, embedded, positions, state, view), known

    def _refined(self, drawing: Drawing, inputs, logits, context: Context, room) -> Proposal:
        """The likeliest tokens after every pass of the refiner; arguments as of ``_sequential`` and ``Refiner``.

        They follow from the committed text alone, so that each is a point mass."""
        refiner, passes = self.head.refiner, min(self.head.config.refine_passes, self.num_draft_tokens)
        assert refiner is not None
        before = jnp.arange(-self.first, 1, dtype=jnp.int32)[
            None
        ]  # the anchor, and for its own slot the token before it
        known, refined = context.tokens_at(context.length[:, None] - 1 + before), logits
        for _ in range(passes):
            drafts = jnp.argmax(refined, axis=-1).astype(jnp.int32)
            if drawing.vocabulary is not None:
                drafts = drawing.vocabulary.tokens[drafts]
            previous = jnp.concatenate([known, context.with_fixed(drafts)[:, :-1]], axis=1)
            refined = logits + refiner(inputs, previous, self.first)
        drawn = dataclasses.replace(drawing, speculation=dataclasses.replace(self.speculation, draft_sampling="argmax"))
        return drawn.at_once(refined, room)

    def _sequential(self, drawing: Drawing, hidden, logits, anchor, room) -> Proposal:
        """Draws in sequence, each conditioned on the one before it.

        Args:
          drawing: how drafts are drawn.
          hidden: ``[B, K, D]``.
          logits: ``[B, K, Vd]``, without the Markov head's term.
          anchor: int32 ``[B, 1]``, the newest committed token.
          room: int32 ``[B]``, the largest number of drafts that the row can use.
        """
        markov = self.head.markov
        assert markov is not None

        def of_slot(state, previous, i):
            at = lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1, axis=1)  # noqa: E731
            added, state = markov(at(hidden), previous, state)
            return state, at(logits) + added

        state, first = of_slot(markov.start(len(hidden)), anchor, 0)
        return drawing.chain(first, state, of_slot, room, unroll_all=True)[1]

    def _selected(self, drawing: Drawing, hidden, logits, anchor, room) -> Proposal:
        """Draws in sequence among the candidates of each slot, by the draft before; arguments as of ``_sequential``.

        What tokens are candidates depends on no draft, and any other token has the logit -inf."""
        selector = self.head.selector
        assert selector is not None
        values, tokens = selector.candidates(logits)
        row = jnp.arange(len(logits), dtype=jnp.int32)[:, None]

        def of_slot(state, previous, i):
            at = lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1, axis=1)  # noqa: E731
            scores = selector.scores(at(hidden), previous, at(values), at(tokens))
            none = jnp.full((len(logits), logits.shape[-1]), -jnp.inf, scores.dtype)
            return state, none.at[row, at(tokens)[:, 0]].set(scores[:, 0])[:, None]

        _, first = of_slot((), anchor, 0)
        return drawing.chain(first, (), of_slot, room, unroll_all=True)[1]
