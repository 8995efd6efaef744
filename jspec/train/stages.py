"""How draft heads without attention are trained: MLP speculator and Medusa."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config.heads import MedusaConfig, MLPConfig
from jspec.models.protocols import Target
from jspec.train.initial_weights import FullVocabulary, output_head_of
from jspec.train.loop import Params
from jspec.train.losses import DepthLogits, TrainingBatch, float32_logits
from jspec.train.objectives import DraftObjective


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
            yield DepthLogits(batch.slots, float32_logits(one.state(batch.hidden), one.head, target))
