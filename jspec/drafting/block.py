"""Block drafters: DFlash, DFlash2, JetSpec, DSpark, Domino, LiLiCorr, XPress. One pass makes all drafts' hidden states."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec.drafting.base import Context, Prompt
from jspec.drafting.drawing import Drawing
from jspec.drafting.eagle import CachedHead
from jspec.drafting.window import make_window
from jspec.models.heads.block import BlockHead, BlockView
from jspec.models.heads.sequential import Slots
from jspec.sampling.verify import Proposal


@dataclasses.dataclass(frozen=True)
class Block(CachedHead):
    """A draft head that fills a block of mask tokens behind the newest token (DFlash and its successors, 2026).

    The pass of a round caches the context of the tokens that the last round committed, whose features the target has
    computed by now, and reads the block behind them. The block begins with the newest committed token, which has no feature
    yet. After a prompt of one token there is no context, and the first round drafts nothing.

    A head whose slots see all others was trained for blocks of one size: it always has that many slots, of which a smaller K
    draws the first. The drafts of a DFlash or JetSpec head do not see each other, as in ``drafting.parallel``. Those of an
    XPress head are the likeliest tokens after its last pass, at any temperature, as its passes were trained. Those of the
    others are drawn one after another, each by those before it (``jspec.models.heads.sequential``).
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
        # The refiner of an XPress head reads the mean of a block, and LiLiCorr scores all of it.
        whole = config.refiner_rank or config.lilicorr is not None or not all(config.causal)
        return config.block_size if whole else self.first + self.num_draft_tokens

    @property
    def slots_beyond(self) -> int:
        return max(self.slots - 1 - self.num_draft_tokens, 0)

    def prefill(self, state, prompt: Prompt):
        view = prompt.view_before(self.max_position)
        return self.head.write_kv(self.head.fuse(prompt.features), view.positions, state, view)

    def propose(self, state, context: Context):
        drawing, room, K = self.drawing(context), self.room(context), self.num_draft_tokens
        block, cache, valid = self._read(state, context)
        slots, newest = self._drafting(block, valid, context), context.tokens_at(context.length[:, None] - 1)
        hidden, logits = slots.hidden, slots.logits
        if self.head.refiner is not None:
            proposal = self._refined(drawing, self.head.refiner.inputs(block, valid), logits, context, room)
        elif self.head.sequential is None:
            proposal = drawing.at_once(logits, room)
        else:
            proposal = self._in_sequence(drawing, slots, newest, room)
        return cache, self._with_confidence(proposal, hidden[:, :K], newest)

    def room(self, context: Context):
        """How many drafts each row may use, int32 ``[B]``."""
        anchor = context.length - 1
        # Draft i is made by the slot at anchor + first + i, so the draft head must have that position.
        return jnp.where(anchor > 0, context.room_within(self.max_position - anchor - self.first), 0)

    def read_slots(self, state, context: Context) -> tuple[Slots, Any]:
        """What the pass leaves of the slots that draft, and the cache."""
        block, cache, valid = self._read(state, context)
        return self._drafting(block, valid, context), cache

    def _drafting(self, block, valid, context: Context) -> Slots:
        """The slots that draft, of hidden states ``[B, n, D]`` and bool ``[B, n]``."""
        whole = self.head.config.lilicorr is not None
        needed = slice(self.first, self.slots if whole else self.first + self.num_draft_tokens)
        fused, embed = self.head.fuse(context.newest_feature), lambda tokens: self.head.embed(tokens, self.target)
        logits = self.head.draft_logits(block[:, needed], self.target)
        return Slots(block[:, needed], logits, valid[:, needed], fused, embed)

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
        places, known = self._places(context)
        positions = jnp.concatenate([window.positions, places], axis=1)
        view = BlockView(context.table, positions, jnp.concatenate([window.valid, known], axis=1), block=n)
        block = jnp.where(places == anchor[:, None], context.tokens_at(places), config.mask_token_id)
        fused, embedded = self.head.fuse(context.features), self.head.embed(block, self.target)
        return *self.head(fused, embedded, positions, state, view), known

    def _refined(self, drawing: Drawing, inputs, logits, context: Context, room) -> Proposal:
        """The likeliest tokens after every pass of the refiner; ``inputs`` as of ``Refiner``.

        They follow from the committed text alone, so that each is a point mass."""
        refiner, passes = self.head.refiner, min(self.head.config.refine_passes, self.num_draft_tokens)
        assert refiner is not None
        # In front of what the slots predict: the anchor, and where its slot does not draft, the token before it as well.
        before = jnp.arange(-self.first, 1, dtype=jnp.int32)[None]
        known, refined = context.tokens_at(context.length[:, None] - 1 + before), logits
        for _ in range(passes):
            drafts = jnp.argmax(refined, axis=-1).astype(jnp.int32)
            if drawing.vocabulary is not None:
                drafts = drawing.vocabulary.tokens[drafts]
            previous = jnp.concatenate([known, context.with_fixed(drafts)[:, :-1]], axis=1)
            refined = logits + refiner(inputs, previous, self.first)
        drawn = dataclasses.replace(drawing, speculation=dataclasses.replace(self.speculation, draft_sampling="argmax"))
        return drawn.at_once(refined, room)

    def _places(self, context: Context) -> tuple[jax.Array, jax.Array]:
        """The positions of the slots, int32 ``[B, n]``, and which of them a row has."""
        places = context.length[:, None] - 1 + jnp.arange(self.slots, dtype=jnp.int32)[None]
        return places, context.live[:, None] & (places < min(self.max_position, context.tokens.shape[1]))

    def _in_sequence(self, drawing: Drawing, slots: Slots, anchor, room) -> Proposal:
        """Draws in sequence, each conditioned on those before it.

        Args:
          drawing: how drafts are drawn.
          slots: those that draft.
          anchor: int32 ``[B, 1]``, the newest committed token.
          room: int32 ``[B]``, the largest number of drafts that the row can use.
        """
        state, read = self.head.sequential.start(slots)
        state, first = read(state, anchor, 0)
        return drawing.chain(first, state, read, room, unroll_all=True)[1]
