"""How each kind of head is trained: one frozen dataclass each, around the head's own module as it serves.

Slot t of a head reads token t + 1, so its draft of depth d is compared with the target's distribution after token t + 1
+ d."""

import abc
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jspec.heads import Eagle3Config, EagleConfig, HeadConfig, MedusaConfig, MLPConfig
from jspec.models import build_head
from jspec.models.branches import Branches
from jspec.models.contract import Target
from jspec.models.quantized import wide
from jspec.train.loop import Loss, Params
from jspec.train.losses import DepthLogits, TrainingBatch, draft_loss, float32_logits, read_windows, soft_cross_entropy


class Objective(Protocol):
    """What is minimised for one kind of head."""

    @property
    def config(self) -> HeadConfig:
        """The head."""
        ...

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Streams of the target that it listens to."""
        ...

    @property
    def depths(self) -> int:
        """Places ahead that it is trained for."""
        ...

    def loss(self, head: Any, target: Target, batch: TrainingBatch, key: jax.Array) -> jax.Array:
        """float32 ``[]`` of a head's module."""
        ...

    def start(self, params: Params, target: Target, tokens: np.ndarray, key: jax.Array) -> tuple[dict, dict]:
        """Where training begins: parameters that do not begin at random, and parameters that are not trained.

        Args:
          params: the head's random weights.
          target: the target's module.
          tokens: the training data.
          key: of what is drawn.
        """
        ...

    def known(self, constants: Mapping[str, jax.Array]) -> jax.Array | None:
        """int32 ``[Vd]``, the tokens that the head knows, in the order of its rows; None if it knows all."""
        ...


class FullVocabulary:
    """A head that knows every token, and whose weights begin at random."""

    def start(self, params: Params, target: Target, tokens: np.ndarray, key: jax.Array) -> tuple[dict, dict]:
        del params, target, tokens, key
        return {}, {}

    def known(self, constants: Mapping[str, jax.Array]) -> jax.Array | None:
        del constants


class DraftVocabulary:
    """An EAGLE-3 head: it may know a part of the vocabulary; its output head and the norm before it begin as the
    target's."""

    config: Eagle3Config

    def start(self, params: Params, target: Target, tokens: np.ndarray, key: jax.Array) -> tuple[dict, dict]:
        config, known, constants = self.config, slice(None), {}
        if config.reduced:
            rows = frequent_tokens(tokens, config.layers.vocab_size, config.draft_vocab_size)
            constants["draft_ids"], known = jnp.asarray(rows), np.flatnonzero(rows >= 0)
        output = wide(target.output_weight, target.output_scale)
        start = {"head.weight": output[known], "norm.weight": target.output_norm}
        if config.mask_token_id is not None:
            start["mask_hidden"] = jax.random.normal(key, (config.feature_size,))
        return start, constants

    def known(self, constants: Mapping[str, jax.Array]) -> jax.Array | None:
        if not self.config.reduced:
            return None
        return jnp.nonzero(constants["draft_ids"] >= 0, size=self.config.draft_vocab_size)[0]


def frequent_tokens(tokens: np.ndarray, vocab_size: int, count: int) -> np.ndarray:
    """int32 ``[V]``: the row of each of the ``count`` most frequent tokens, in the order of their ids; -1 for
    others."""
    frequency = np.bincount(tokens, minlength=vocab_size)
    chosen = np.sort(np.argsort(-frequency, kind="stable")[:count])
    rows = np.full(vocab_size, -1, np.int32)
    rows[chosen] = np.arange(count, dtype=np.int32)
    return rows


@dataclasses.dataclass(frozen=True)
class FeatureRegression(FullVocabulary):
    """EAGLE (Li et al., 2024): the next feature by smooth L1, and by it the target's distribution, one slot ahead.

    Attributes:
      config: the head.
      regression, cross_entropy: weights of the two, 1 and 0.1 in the paper.
      noise: features are moved by up to so much, uniformly, so that the head learns to read its own inexact ones; the
        authors' 0.1 at 512 tokens.
    """

    config: EagleConfig
    regression: float = 1.0
    cross_entropy: float = 0.1
    noise: float = 0.1

    aux_layers = ()
    depths = 1

    def loss(self, head, target, batch: TrainingBatch, key) -> jax.Array:
        noise = jax.random.uniform(key, batch.features.shape, batch.features.dtype, -self.noise, self.noise)
        view = Branches(batch.slots, 0)
        embedded = head.embed(batch.tokens[:, 1:], target)
        cache = ((),) * self.config.layers.num_layers
        hidden, _ = head(embedded, batch.features + noise, view.positions(len(embedded)), cache, view)
        hidden = hidden[:, :-1]  # the last slot's feature lies past the window
        distance = optax.losses.huber_loss(hidden.astype(jnp.float32), batch.hidden[:, 1:].astype(jnp.float32))
        logits = float32_logits(hidden, None, target)
        entropy = soft_cross_entropy(batch.distribution[:, 1:], logits)
        return self.regression * distance.mean() + self.cross_entropy * entropy.mean()


class Chain(abc.ABC):
    """Objectives that compare drafts of depth 0, 1, .. with the target's distribution; depth d counts ``decay **
    d``."""

    decay: float

    def loss(self, head, target, batch: TrainingBatch, key) -> jax.Array:
        return draft_loss(batch, self.drafts(head, target, batch, key), self.decay)

    @abc.abstractmethod
    def drafts(self, head, target, batch: TrainingBatch, key) -> Iterator[DepthLogits]:
        """What the head drafts after each slot, depth by depth."""


@dataclasses.dataclass(frozen=True)
class TrainingTimeTest(DraftVocabulary, Chain):
    """EAGLE-3 (Li et al., 2025): the head reads its own outputs, as it will when it serves, several slots in a row.

    Attributes:
      config: the head.
      aux_layers: the target's streams that it reads.
      depths: slots in a row, 7 in the paper.
      decay: weight of a slot against the one before it, 0.8 in the paper.
    """

    config: Eagle3Config
    aux_layers: tuple[int, ...]
    depths: int = 7
    decay: float = 0.8

    def drafts(self, head, target, batch: TrainingBatch, key) -> Iterator[DepthLogits]:
        del key
        cache, features = ((),) * self.config.layers.num_layers, head.fuse(batch.features)
        for depth in range(self.depths):
            view = Branches(batch.slots, depth)
            embedded = head.embed(batch.tokens_at(batch.slots + depth + 1), target)
            hidden, cache = head(embedded, features, view.positions(len(embedded)), cache, view)
            yield DepthLogits(batch.slots, float32_logits(head.norm(hidden), head.head, target))
            features = head.recycle(hidden)


@dataclasses.dataclass(frozen=True)
class ConditionalDrop(DraftVocabulary, Chain):
    """P-EAGLE (2026): mask slots behind every text slot, fewer at each depth (COD, An et al., 2025).

    Depth d keeps n r^d of the n branches, at least a share of ``floor``; a branch that is kept was kept at every depth
    before, so each slot finds the ones that it attends to. Slots that are dropped are not computed.

    Attributes:
      config: the head.
      aux_layers: the target's streams that it reads.
      depths: drafts of a pass, K.
      keep: r.
      floor: smallest share.
      decay: weight of a depth against the one before it. With ``decay == keep`` every slot that is kept counts alike,
        as in a plain mean over them.
    """

    config: Eagle3Config
    aux_layers: tuple[int, ...]
    depths: int = 8
    keep: float = 0.8
    floor: float = 0.2
    decay: float = 0.8

    def kept(self, n: int) -> tuple[int, ...]:
        """Branches at each depth, of n slots of text."""
        return tuple(math.ceil(n * max(self.keep**depth, self.floor)) for depth in range(self.depths))

    def drafts(self, head, target, batch: TrainingBatch, key) -> Iterator[DepthLogits]:
        B, n = batch.hidden.shape[:2]
        cache = ((),) * self.config.layers.num_layers
        masked = head.fuse(head.mask_hidden[...].reshape(1, 1, -1))
        assert self.config.mask_token_id is not None
        mask_token = head.embed(jnp.full((1, 1), self.config.mask_token_id), target)
        order = jax.random.permutation(key, n).astype(jnp.int32)
        embedded, features = head.embed(batch.tokens[:, 1:], target), head.fuse(batch.features)
        for depth, count in enumerate(self.kept(n)):
            view = Branches(order[:count] if depth else batch.slots, depth)
            hidden, cache = head(embedded, features, view.positions(B), cache, view)
            yield DepthLogits(view.bases, float32_logits(head.norm(hidden), head.head, target))
            if depth + 1 < self.depths:
                shape = (B, self.kept(n)[depth + 1], masked.shape[-1])
                embedded, features = jnp.broadcast_to(mask_token, shape), jnp.broadcast_to(masked, shape)


@dataclasses.dataclass(frozen=True)
class Stages(FullVocabulary, Chain):
    """MLP speculator (Wertheimer et al., 2024): every stage reads the true token, and all count alike.

    Attributes:
      config: the head.
      decay: weight of a stage against the one before it.
    """

    config: MLPConfig
    decay: float = 1.0

    aux_layers = ()

    @property
    def depths(self) -> int:
        return self.config.num_stages

    def drafts(self, head, target, batch: TrainingBatch, key) -> Iterator[DepthLogits]:
        del key
        state = head.start(batch.hidden)
        for i in range(self.depths):
            state = head.stage(i, state, batch.tokens_at(batch.slots + 1 + i))
            yield DepthLogits(batch.slots, float32_logits(state, head.heads[0 if self.config.tied else i], target))


@dataclasses.dataclass(frozen=True)
class Heads(FullVocabulary, Chain):
    """Medusa (Cai et al., 2024) on a frozen target: head i against the target's distribution i + 1 places ahead.

    Attributes:
      config: the head.
      decay: weight of a head against the one before it, 0.8 in the paper.
    """

    config: MedusaConfig
    decay: float = 0.8

    aux_layers = ()

    @property
    def depths(self) -> int:
        return self.config.num_heads

    def start(self, params: Params, target: Target, tokens: np.ndarray, key: jax.Array) -> tuple[dict, dict]:
        """The blocks begin as the identity, the output heads as the target's."""
        del tokens, key
        blocks = {name: jnp.zeros_like(one) for name, one in params.items() if name.endswith("0.weight")}
        output = wide(target.output_weight, target.output_scale)
        return blocks | {name: output for name in params if name.endswith("head.weight")}, {}

    def drafts(self, head, target, batch: TrainingBatch, key) -> Iterator[DepthLogits]:
        del key
        for one in head.heads:
            hidden = batch.hidden
            for block in one.blocks:
                hidden = hidden + jax.nn.silu(block(hidden))
            yield DepthLogits(batch.slots, float32_logits(hidden, one.head, target))


def loss_of(objective: Objective, merge_target, dtype: str) -> Loss:
    """``loss(params, (target leaves, constants), windows, key)``: the head is built in ``dtype`` around fp32 params.

    Args:
      objective: what is minimised.
      merge_target: leaves of the target -> its module.
      dtype: ``bfloat16`` or ``float32``, what both compute in.
    """

    def loss(params: Params, frozen: tuple[Any, Mapping[str, jax.Array]], windows, key):
        leaves, constants = frozen
        target, head = merge_target(leaves), build_head(objective.config, {**params, **constants}, dtype)
        return objective.loss(
            head, target, read_windows(target, windows, objective.aux_layers, objective.known(constants)), key
        )

    return loss
