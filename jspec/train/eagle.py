"""How draft heads with decoder layers are trained that read a feature of each token: EAGLE, EAGLE-3, P-EAGLE and MTP."""

import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jspec.config.heads import Eagle3Config, EagleConfig, MTPConfig
from jspec.models.protocols import Target
from jspec.train.initial_weights import DraftVocabulary, FullVocabulary
from jspec.train.loop import Params
from jspec.train.losses import DepthLogits, TrainingBatch, float32_logits, masked_mean, soft_cross_entropy
from jspec.train.objectives import DraftObjective
from jspec.train.ttt_attention import Branches


@dataclasses.dataclass(frozen=True)
class FeatureRegression(FullVocabulary):
    """EAGLE (Li et al., 2024): predict the target's next feature, and through it the target's distribution.

    The loss is a weighted sum of the smooth L1 distance between the head's output at slot t and the target's hidden
    state of token t + 1, and of the cross-entropy between the distributions that both of them lead to.

    Attributes:
      config: the draft head.
      regression, cross_entropy: the weights of the two parts, 1 and 0.1 in the paper.
      noise: uniform noise in -noise .. noise is added to the features, so that the head learns to read its own inexact
        outputs. The authors use 0.1 for texts of 512 tokens.
    """

    config: EagleConfig
    regression: float = 1.0
    cross_entropy: float = 0.1
    noise: float = 0.1

    aux_layers = ()
    depths = 1

    def loss(self, head, target, batch: TrainingBatch, key) -> jax.Array:
        noise = self._noise(batch, key)
        view = Branches(batch.slots, 0)
        embedded = head.embed(batch.tokens[:, 1:], target)
        cache = ((),) * self.config.layers.num_layers
        hidden, _ = head(embedded, batch.features + noise, view.positions(len(embedded)), cache, view)
        hidden = hidden[:, :-1]  # the feature after the last slot lies past the window
        distance = optax.losses.huber_loss(hidden.astype(jnp.float32), batch.hidden[:, 1:].astype(jnp.float32))
        logits = float32_logits(hidden, None, target)
        entropy = soft_cross_entropy(batch.distribution[:, 1:], logits)
        counted = batch.counted[:, 2:]  # the tokens that slots draft
        distance, entropy = masked_mean(distance.mean(-1), counted), masked_mean(entropy, counted)
        return self.regression * distance + self.cross_entropy * entropy

    def _noise(self, batch: TrainingBatch, key) -> jax.Array:
        """The noise that is added to the features, ``[B, n, E]`` in their dtype."""
        shape, dtype = batch.features.shape[1:], batch.features.dtype
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, batch.numbers)
        return jax.vmap(lambda key: jax.random.uniform(key, shape, dtype, -self.noise, self.noise))(keys)


@dataclasses.dataclass(frozen=True)
class TrainingTimeTest(DraftVocabulary, DraftObjective):
    """EAGLE-3 (Li et al., 2025): the head reads its own outputs in training, as it does when it serves.

    At depth 0 it reads the target's features, and at every further depth its own output of the depth before.

    Attributes:
      config: the draft head.
      aux_layers: after which layers of the target the head reads auxiliary hidden states.
      depths: how many drafts follow each slot, 7 in the paper.
      decay: the weight of a depth relative to the one before it, 0.8 in the paper.
    """

    config: Eagle3Config
    aux_layers: tuple[int, ...]
    depths: int = 7
    decay: float = 0.8

    def drafts(self, head, target, batch: TrainingBatch, key) -> Iterator[DepthLogits]:
        del key
        for hidden in fed_back(head, target, batch, self.depths):
            yield DepthLogits(batch.slots, float32_logits(normed(head, hidden), head.head, target))


def normed(head, hidden) -> jax.Array:
    """What the output head reads, ``[B, n, D]``."""
    return hidden if head.norm is None else head.norm(hidden)


def fed_back(head, target, batch: TrainingBatch, depths: int) -> Iterator[jax.Array]:
    """The outputs of a head after each slot, ``[B, n, D]`` for each depth: at depth 0 the head reads the target's features,
    at every further depth its own outputs of the depth before."""
    cache, features = ((),) * head.config.layers.num_layers, head.fuse(batch.features)
    for depth in range(depths):
        view = Branches(batch.slots, depth)
        embedded = head.embed(batch.tokens_at(batch.slots + depth + 1), target)
        hidden, cache = head(embedded, features, view.positions(len(embedded)), cache, view)
        yield hidden
        features = head.recycle(hidden)


@dataclasses.dataclass(frozen=True)
class MultiTokenPrediction(FullVocabulary, DraftObjective):
    """Multi-token prediction (DeepSeek-V3, 2024) by one layer for all drafts, which reads its own outputs in training
    (FastMTP, 2025).

    Attributes:
      config: the layer.
      depths: how many drafts follow each slot, 3 in FastMTP and 1 in DeepSeek-V3.
      decay: the weight of a depth relative to the one before it, 0.6 in FastMTP.
    """

    config: MTPConfig
    depths: int = 3
    decay: float = 0.6

    aux_layers = ()

    def start(self, params: Params, target: Target, tokens: np.ndarray, key: jax.Array) -> tuple[dict, dict]:
        """The norm before the output head starts as the target's."""
        del params, tokens, key
        return {"norms.0.weight": target.output_norm}, {}

    def drafts(self, head, target, batch: TrainingBatch, key) -> Iterator[DepthLogits]:
        del key
        for hidden in fed_back(head, target, batch, self.depths):
            hidden = hidden if self.config.norm_output else head.norms[0](hidden)
            yield DepthLogits(batch.slots, float32_logits(hidden, None, target))


@dataclasses.dataclass(frozen=True)
class ConditionalDrop(DraftVocabulary, DraftObjective):
    """P-EAGLE (2026): the head fills mask slots behind each text slot, and fewer of them at each depth.

    Dropping mask slots with the depth is conditional drop, COD, of An et al. (2025). Depth d keeps n r^d of the n branches,
    but at least the share ``floor``. A branch that is kept at one depth was kept at every depth before, so that each mask
    slot finds all slots to which it attends. Dropped slots are not computed.

    For example, with n = 100, r = 0.8 and ``floor`` = 0.2, depths 0, 1 and 9 have 100, 80 and 20 slots.

    Attributes:
      config, aux_layers: as of ``TrainingTimeTest``.
      depths: K, how many drafts one pass makes.
      keep: r, the share of branches that a depth keeps of the depth before.
      floor: the smallest share of all branches that a depth keeps.
      decay: the weight of a depth relative to the one before it. If it equals ``keep``, every slot that is kept has about
        the same weight, as in a plain mean over these slots.
    """

    config: Eagle3Config
    aux_layers: tuple[int, ...]
    depths: int = 8
    keep: float = 0.8
    floor: float = 0.2
    decay: float = 0.8

    def start(self, params: Params, target: Target, tokens: np.ndarray, key: jax.Array) -> tuple[dict, dict]:
        start, constants = super().start(params, target, tokens, key)
        return start | {"mask_hidden": jax.random.normal(key, (self.config.feature_size,))}, constants

    def kept(self, n: int) -> tuple[int, ...]:
        """How many branches each depth keeps of the n that leave a text of n slots."""
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
            yield DepthLogits(view.bases, float32_logits(normed(head, hidden), head.head, target))
            if depth + 1 < self.depths:
                shape = (B, self.kept(n)[depth + 1], masked.shape[-1])
                embedded, features = jnp.broadcast_to(mask_token, shape), jnp.broadcast_to(masked, shape)
