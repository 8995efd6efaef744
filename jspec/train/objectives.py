"""What an objective is: how one kind of draft head is trained, around the module that also serves.

Slot t of a draft head reads the feature of token t, and token t + 1. Its draft of depth 0 is for token t + 2, and its draft
of depth d is for token t + 2 + d. So the draft of depth d is compared with the target's distribution after token
t + 1 + d.
"""

import abc
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from jspec.config.heads import HeadConfig
from jspec.models import build_head
from jspec.models.protocols import Target
from jspec.train.loop import Loss, Params
from jspec.train.losses import DepthLogits, TrainingBatch, draft_loss, read_windows


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
