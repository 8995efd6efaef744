"""How each kind of draft head is trained: one frozen dataclass for each, around the module that also serves.

Slot t of a draft head reads the feature of token t, and token t + 1. Its draft of depth 0 is for token t + 2, and its draft
of depth d is for token t + 2 + d. So the draft of depth d is compared with the target's distribution after token
t + 1 + d.
"""

import abc
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jspec.config.heads import BlockConfig, Eagle3Config, EagleConfig, HeadConfig, MedusaConfig, MLPConfig, MTPConfig
from jspec.models import build_head
from jspec.models.protocols import Target
from jspec.models.quantization import as_float32
from jspec.train.loop import Loss, Params
from jspec.train.losses import DepthLogits, TrainingBatch, draft_loss, float32_logits, read_windows, soft_cross_entropy
from jspec.train.ttt_attention import Branches


class Objective(Protocol):
    """The loss of one kind of draft head, and its initial weights.

    Example::

        def drafts_trained(objective: Objective):
            return objective.config.method, objective.depths
    """

    @property
    def config(self) -> HeadConfig:
        """The config of the draft head."""
        ...

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """After which layers of the target the head reads auxiliary hidden states; () means the final hidden state."""
        ...

    @property
    def depths(self) -> int:
        """How many drafts after a slot the head is trained to make."""
        ...

    def loss(self, head: Any, target: Target, batch: TrainingBatch, key: jax.Array) -> jax.Array:
        """The loss of the draft head's module on a batch, float32 ``[]``; ``key`` is for what the objective draws.

        It is a mean over windows of equal weight. What is drawn for a window follows from the key and from the number of the
        window.
        """
        ...

    def start(self, params: Params, target: Target, tokens: np.ndarray, key: jax.Array) -> tuple[dict, dict]:
        """The parameters that do not start at random, and the parameters that are not trained.

        Args:
          params: the head's random weights.
          target: the target's module.
          tokens: the training data, as a flat array of token ids.
          key: the key of what is drawn.
        """
        ...

    def known(self, constants: Mapping[str, jax.Array]) -> jax.Array | None:
        """int32 ``[Vd]``, the token of each output channel of the head's own output head; None if it drafts every token."""
        ...


class FullVocabulary:
    """For objectives of a head that can draft every token, and whose weights all start at random."""

    def start(self, params: Params, target: Target, tokens: np.ndarray, key: jax.Array) -> tuple[dict, dict]:
        del params, target, tokens, key
        return {}, {}

    def known(self, constants: Mapping[str, jax.Array]) -> jax.Array | None:
        del constants


class DraftVocabulary:
    """For objectives of an EAGLE-3 or P-EAGLE head, which may draft only a part of the target's vocabulary.

    Its output head, and the norm before that, start as copies of the target's.
    """

    config: Eagle3Config

    def start(self, params: Params, target: Target, tokens: np.ndarray, key: jax.Array) -> tuple[dict, dict]:
        config, known, constants = self.config, slice(None), {}
        if config.reduced:
            draft_ids = frequent_tokens(tokens, config.layers.vocab_size, config.draft_vocab_size)
            constants["draft_ids"], known = jnp.asarray(draft_ids), np.flatnonzero(draft_ids >= 0)
        output = output_head_of(target)
        start = {"head.weight": output[known], "norm.weight": target.output_norm}
        if config.mask_token_id is not None:
            start["mask_hidden"] = jax.random.normal(key, (config.feature_size,))
        return start, constants

    def known(self, constants: Mapping[str, jax.Array]) -> jax.Array | None:
        return known_tokens(self.config, constants)


def known_tokens(config: Eagle3Config | BlockConfig, constants: Mapping[str, jax.Array]) -> jax.Array | None:
    """The tokens of a draft vocabulary in the order of their draft ids, int32 ``[Vd]``; None if it has every token."""
    if not config.reduced:
        return None
    return jnp.nonzero(constants["draft_ids"] >= 0, size=config.draft_vocab_size)[0]


def output_head_of(target: Target) -> jax.Array | np.ndarray:
    """The target's output head as the start of a head's own, float32 ``[V, D]``; a divisor of logits is part of it.

    The parts of a target in shards are put together in host memory, because one device may not have room for all of them.

    Raises:
      ValueError: the target's output head does not read its hidden states, but a linear map of them.
    """
    config = target.config
    if config.embedding_size is not None:
        raise ValueError(
            f"the target's output head reads {config.embedding_size} numbers and its hidden states have "
            f"{config.hidden_size}; expected a target without embedding_size for a head that has an output head"
        )
    weight, scale = target.output_weight, target.output_scale
    if getattr(target, "shards", None) is not None:  # behind the last token is padding
        weight, scale = (None if array is None else np.asarray(array)[: config.vocab_size] for array in (weight, scale))
    return as_float32(weight, scale, config.hidden_size) / config.logit_divisor


def frequent_tokens(tokens: np.ndarray, vocab_size: int, count: int) -> np.ndarray:
    """The draft vocabulary of the ``count`` most frequent tokens, int32 ``[V]``.

    The entry of a token is its id in the draft vocabulary, or -1 if it is not in there. Draft ids follow the order of the
    token ids: if tokens 3 and 7 of 8 are the most frequent, the result is ``[-1, -1, -1, 0, -1, -1, -1, 1]``.
    """
    frequency = np.bincount(tokens, minlength=vocab_size)
    chosen = np.sort(np.argsort(-frequency, kind="stable")[:count])
    draft_ids = np.full(vocab_size, -1, np.int32)
    draft_ids[chosen] = np.arange(count, dtype=np.int32)
    return draft_ids


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
        return self.regression * distance.mean() + self.cross_entropy * entropy.mean()

    def _noise(self, batch: TrainingBatch, key) -> jax.Array:
        """The noise that is added to the features, ``[B, n, E]`` in their dtype."""
        shape, dtype = batch.features.shape[1:], batch.features.dtype
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, batch.numbers)
        return jax.vmap(lambda key: jax.random.uniform(key, shape, dtype, -self.noise, self.noise))(keys)


class DraftObjective(abc.ABC):
    """For objectives that compare the drafts of depth 0, 1, .. with the target's distributions.

    The loss is a weighted mean over the depths. Depth d has the weight ``decay ** d``.
    """

    decay: float

    def loss(self, head, target, batch: TrainingBatch, key) -> jax.Array:
        return draft_loss(batch, self.drafts(head, target, batch, key), self.decay)

    @abc.abstractmethod
    def drafts(self, head, target, batch: TrainingBatch, key) -> Iterator[DepthLogits]:
        """The logits of the head's drafts after each slot, one entry for each depth."""


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
            yield DepthLogits(batch.slots, float32_logits(head.norm(hidden), head.head, target))


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
            yield DepthLogits(batch.slots, float32_logits(hidden, None, target))


@dataclasses.dataclass(frozen=True)
class ConditionalDrop(DraftVocabulary, DraftObjective):
    """P-EAGLE (2026): the head fills mask slots behind each text slot, and fewer of them at each depth.

    Dropping mask slots with the depth is conditional drop, COD, of An et al. (2025). Depth d keeps n r^d of the n branches,
    but at least the share ``floor``. A branch that is kept at one depth was kept at every depth before, so that each mask
    slot finds all slots to which it attends. Dropped slots are not computed.

    For example, with n = 100, r = 0.8 and ``floor`` = 0.2, depths 0, 1 and 9 have 100, 80 and 20 slots.

    Attributes:
      config: the draft head.
      aux_layers: after which layers of the target the head reads auxiliary hidden states.
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
            yield DepthLogits(view.bases, float32_logits(head.norm(hidden), head.head, target))
            if depth + 1 < self.depths:
                shape = (B, self.kept(n)[depth + 1], masked.shape[-1])
                embedded, features = jnp.broadcast_to(mask_token, shape), jnp.broadcast_to(masked, shape)


@dataclasses.dataclass(frozen=True)
class EachStage(FullVocabulary, DraftObjective):
    """MLP speculator (Wertheimer et al., 2024): each stage reads the true token, and all stages have the same weight.

    Attributes:
      config: the draft head.
      decay: the weight of a stage relative to the one before it.
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
class EachMedusaHead(FullVocabulary, DraftObjective):
    """Medusa (Cai et al., 2024) on a frozen target: each Medusa head predicts one of the tokens that follow.

    After token t the target itself predicts token t + 1, and Medusa head i predicts token t + 2 + i. It is compared with
    the target's distribution after token t + 1 + i.

    Attributes:
      config: the draft head, that is, all Medusa heads.
      decay: the weight of a Medusa head relative to the one before it, 0.8 in the paper.
    """

    config: MedusaConfig
    decay: float = 0.8

    aux_layers = ()

    @property
    def depths(self) -> int:
        return self.config.num_heads

    def start(self, params: Params, target: Target, tokens: np.ndarray, key: jax.Array) -> tuple[dict, dict]:
        """The residual blocks start as the identity, and the output heads as copies of the target's."""
        del tokens, key
        blocks = {name: jnp.zeros_like(one) for name, one in params.items() if name.endswith("0.weight")}
        output = output_head_of(target)
        return blocks | {name: output for name in params if name.endswith("head.weight")}, {}

    def drafts(self, head, target, batch: TrainingBatch, key) -> Iterator[DepthLogits]:
        del key
        for one in head.heads:
            hidden = batch.hidden
            for block in one.blocks:
                hidden = hidden + jax.nn.silu(block(hidden))
            yield DepthLogits(batch.slots, float32_logits(hidden, one.head, target))


def loss_of(objective: Objective, merge_target, dtype: str, axis: str | None = None) -> Loss:
    """The loss as a function ``loss(params, (target leaves, constants), windows, key)``, which the optimiser differentiates.

    It builds the draft head in ``dtype`` from float32 ``params``, and reads the windows with the target.

    Args:
      objective: what is minimised.
      merge_target: makes the target's module from its leaves.
      dtype: ``bfloat16`` or ``float32``, the type in which target and head compute.
      axis: the mesh axis whose devices have as many of the windows each, one after the other; None if all windows are here.
    """

    def loss(params: Params, frozen: tuple[Any, Mapping[str, jax.Array]], windows, key):
        leaves, constants = frozen
        target, head = merge_target(leaves), build_head(objective.config, {**params, **constants}, dtype)
        first = 0 if axis is None else jax.lax.axis_index(axis) * len(windows)
        batch = read_windows(target, windows, objective.aux_layers, objective.known(constants), first)
        return objective.loss(head, target, batch, key)

    return loss
