"""How block drafters are trained, DFlash (2026) and DSpark (2026): blocks are filled at random anchors of each window.

The block of an anchor a reads token a and mask tokens, and its draft i is for token a + 1 + i. It is compared with that
token of the window, the *label*, and with the target's distribution after token a + i. Which slot makes draft i is a choice
of the head: slot i if the anchor's slot drafts, otherwise slot i + 1."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jspec.config.heads import BlockConfig
from jspec.models.protocols import Target
from jspec.pallas.matmul import matmul
from jspec.train.block_attention import Anchored
from jspec.train.initial_weights import DraftVocabulary
from jspec.train.losses import TrainingBatch, float32_logits, masked_mean, soft_cross_entropy


class DraftSlots(NamedTuple):
    """Draft i of every block: its inputs, and its label and target distribution.

    ``filled`` returns those of all K drafts, where each array has an axis ``[K, ...]`` before the others.

    Attributes:
      hidden: ``[B, A, D]``, of the slot that makes the draft, after the final norm.
      read: ``[B, A, Rm]``, what the Markov head turns into its part of the logits; None in a head without.
      previous: int32 ``[B, A]``, the true token before the draft. When the head serves, this is the anchor or a draft.
      after: int32 ``[B, A]``, the position a + i, behind which the draft's token stands.
      label: int32 ``[B, A]``, that token. Past the end of the window it is any token, and ``weight`` is 0; it is 0 for a
        token that does not count, too.
      weight: float32 ``[B, A]``, how much the draft counts.
    """

    hidden: jax.Array
    read: jax.Array | None
    previous: jax.Array
    after: jax.Array
    label: jax.Array
    weight: jax.Array


@dataclasses.dataclass(frozen=True)
class FilledBlocks(DraftVocabulary):
    """DFlash (2026) and DSpark (2026): the drafts of blocks at random anchors, against the text and the target.

    The loss of a draft is a weighted sum of four parts: the cross-entropy of the label, the cross-entropy ``-sum p log q``,
    where q is the draft's distribution and p the target's, the sum of |q - p| over the vocabulary, and what the confidence
    head makes of 1 - sum |q - p| / 2, which is the probability that the draft is accepted. The loss of a window is a
    weighted mean over its drafts. Draft i has the weight ``exp(-i / decay)``, and one whose label lies past the window has
    none. The loss of a step is the plain mean over windows, so that it does not depend on which device has which.

    A DSpark head reads the true token before each draft, and not the draft itself (teacher forcing).

    Attributes:
      config: the draft head.
      cross_entropy, soft, distance, confidence: the weights of the four parts. Their authors have 0.1, 0, 0.9 and 1 for
        DSpark, and 1, 0, 0 and 0 for DFlash. ``confidence`` is 0 for a head that has no confidence head.
      decay: after how many drafts the weight has fallen to 1 / e, 4 in both.
      spacing: a window of n tokens has n / ``spacing`` anchors, but at least one. With 512 of them in 4096 tokens, as the
        authors have it, this is 8.
      most_anchors: the largest number of anchors in a window.
    """

    config: BlockConfig
    cross_entropy: float
    distance: float
    confidence: float
    soft: float = 0.0
    decay: float = 4.0
    spacing: int = 8
    most_anchors: int = 512

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.config.aux_layers

    @property
    def depths(self) -> int:
        return self.config.max_drafts

    def loss(self, head, target, batch: TrainingBatch, key) -> jax.Array:
        return self.loss_at(head, target, batch, self.anchors(batch, key))

    def anchors(self, batch: TrainingBatch, key) -> jax.Array:
        """Different anchors of each window, int32 ``[B, A]``, each drawn uniformly from those that have a context and a
        label."""
        n = batch.hidden.shape[1]
        count = min(max(n // self.spacing, 1), self.most_anchors)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, batch.numbers)
        return jax.vmap(lambda key: 1 + jax.random.permutation(key, n - 1)[:count].astype(jnp.int32))(keys)

    def loss_at(self, head, target, batch: TrainingBatch, anchors) -> jax.Array:
        """The loss of the blocks at int32 ``anchors [B, A]``, float32 ``[]``.

        Logits of one draft of all blocks are computed at a time, and once more for the gradient, so that none of the others
        is in memory: ``[B, A, Vd]``, and not ``[B, A, K, Vd]``."""
        slots = filled(head, target, batch, anchors, self.decay)
        losses = jax.lax.map(jax.checkpoint(lambda one: self._of_draft(head, target, batch, one)), slots)
        weights = slots.weight.sum(axis=(0, 2))
        return masked_mean(losses.sum(axis=0) / jnp.where(weights > 0, weights, 1.0), weights > 0)

    def _of_draft(self, head, target, batch: TrainingBatch, slots: DraftSlots) -> jax.Array:
        """The loss of draft i of all blocks of a window, times its weight and summed over the blocks, float32 ``[B]``."""
        logits = draft_logits(head, target, slots)
        log_q = jax.nn.log_softmax(logits)
        loss = self.cross_entropy * label_cross_entropy(log_q, slots.label, head.draft_ids)
        if not self.soft and not self.distance and not self.confidence:
            return jnp.sum(slots.weight * loss, axis=1)  # the target's distribution is not even computed
        behind = jnp.minimum(slots.after, batch.distribution.shape[1] - 1)
        p = jnp.take_along_axis(batch.distribution, behind[:, :, None], axis=1)
        distance = l1_distance(p, jnp.exp(log_q))
        loss += self.distance * distance + self.soft * soft_cross_entropy(p, logits)
        if self.confidence:
            accepted = jax.lax.stop_gradient(1 - distance / 2)
            said = head.confidence_logits(slots.hidden, slots.previous)
            loss += self.confidence * optax.sigmoid_binary_cross_entropy(said, accepted)
        return jnp.sum(slots.weight * loss, axis=1)


def filled(head: Any, target: Target, batch: TrainingBatch, anchors, decay: float) -> DraftSlots:
    """Fill the blocks at int32 ``anchors [B, A]`` in one pass, and return all of their drafts, ``[K, B, A, ...]`` each."""
    config: BlockConfig = head.config
    (B, A), n, K = anchors.shape, config.block_size, config.max_drafts
    view = Anchored(anchors, n)
    newest = jnp.take_along_axis(batch.tokens, anchors, axis=1)
    block = jnp.full((B, A, n), config.mask_token_id, jnp.int32).at[:, :, 0].set(newest)
    context, embedded = head.fuse(batch.features), head.embed(block.reshape(B, -1), target)
    hidden, _ = head(context, embedded, view.positions(context.shape[1]), (None,) * config.layers.num_layers, view)
    hidden = jnp.moveaxis(hidden.reshape(B, A, n, -1)[:, :, n - K :], 2, 0)  # [K, B, A, D]

    drafts = jnp.arange(K, dtype=jnp.int32)[:, None, None]
    after, last = anchors[None] + drafts, batch.tokens.shape[1] - 1
    rows, labels = jnp.arange(B)[None, :, None], jnp.minimum(after + 1, last)
    tokens = batch.tokens[rows, jnp.stack([jnp.minimum(after, last), labels])]
    weight = jnp.where((after < last) & batch.counted[rows, labels], jnp.exp(-drafts.astype(jnp.float32) / decay), 0.0)
    return DraftSlots(hidden, _markov_reads(head, hidden, tokens[0]), tokens[0], after, tokens[1], weight)


def _markov_reads(head, hidden, previous) -> jax.Array | None:
    """Inputs of the Markov head for each draft, ``[K, B, A, Rm]``; None without one.

    Args:
      head: the draft head.
      hidden: ``[K, B, A, D]``.
      previous: int32 ``[K, B, A]``, the token before each draft.
    """
    if head.markov is None:
        return None
    B, A = previous.shape[1:]
    reads, state = [], head.markov.no_state(B * A).reshape(B, A, -1)
    for slot, token in zip(hidden, previous, strict=True):
        read, state = head.markov.read(slot, token, state)
        reads.append(read)
    return jnp.stack(reads)


def draft_logits(head, target: Target, slots: DraftSlots) -> jax.Array:
    """The logits of one draft of every block, float32 ``[B, A, Vd]``."""
    logits = float32_logits(slots.hidden, head.head, target)
    return logits if slots.read is None else logits + matmul(slots.read, head.markov.out.weight[...], dtype=jnp.float32)


def label_cross_entropy(log_q, label, draft_ids) -> jax.Array:
    """``-log q`` of the label in nats, float32 ``[B, A]``; 0 of a label that the draft head cannot propose.

    Args:
      log_q: float32 ``[B, A, Vd]``.
      label: int32 ``[B, A]``.
      draft_ids: int32 ``[V]``, as ``jspec.models.heads.draft_vocabulary`` has it; None if every token can be proposed.
    """
    index = label if draft_ids is None else draft_ids[...][label]
    chosen = jnp.take_along_axis(log_q, jnp.maximum(index, 0)[:, :, None], axis=-1)[..., 0]
    return jnp.where(index >= 0, -chosen, 0.0)


def l1_distance(p, q) -> jax.Array:
    """The sum of ``|q - p|`` over the whole vocabulary, ``[B, A, Vd] -> [B, A]`` in float32.

    What p lacks to a sum of 1 is the probability of tokens outside the draft vocabulary, of which q has none."""
    return jnp.sum(jnp.abs(q - p), axis=-1) + jnp.maximum(1 - jnp.sum(p, axis=-1), 0.0)
