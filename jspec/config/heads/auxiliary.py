"""The base of the configs of draft heads that fuse auxiliary hidden states of the target."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from jspec._validation import is_int, require
from jspec.config import ModelConfig
from jspec.config.heads.base import EMBEDDING, LayeredConfig, require_count, require_same_target
from jspec.config.param_specs import DRAFT_IDS, DRAFT_VOCAB, EMBED, VOCAB, Axis, Parameter, linear, matrix

FEATURE = Axis("E", "feature")


class AuxiliaryConfig(LayeredConfig):
    """Base of the configs of EAGLE-3, P-EAGLE and block drafters.

    A linear map fuses auxiliary hidden states of the target, ``[E]``, to the head's width ``[D]``, which may differ from
    the target's, Dt. Embedding and output head are the head's own or the target's; a reduced vocabulary needs an own
    output head.
    """

    target_hidden_size: int
    own_embedding: bool
    own_head: bool
    aux_layers: Any  # tuple[int, ...], or None for those that the target's depth gives

    @property
    def feature_size(self) -> int:
        """E, the length of the joined auxiliary hidden states at one position."""
        return len(self.aux_layers) * self.target_hidden_size

    @property
    def dimensions(self) -> Mapping[str, int]:
        return {**super().dimensions, "Dt": self.target_hidden_size, "E": self.feature_size}

    @property
    def borrowable(self) -> tuple[tuple[str, str], ...]:
        output = () if self.reduced else (("own_head", "head.weight"),)
        return (("own_embedding", "embedding"), *output)

    @property
    def embedding(self) -> tuple[Parameter, ...]:
        """The token embedding, if the head has its own."""
        return (matrix("embedding", EMBEDDING, VOCAB, EMBED),) if self.own_embedding else ()

    @property
    def output_head(self) -> tuple[Parameter, ...]:
        """The output head, if the head has its own, and the token ids of a reduced vocabulary."""
        kind = self.layers.quantization_of("head")
        head = linear("head", {"lm_head": DRAFT_VOCAB}, EMBED, quantization=kind) if self.own_head else ()
        return (*head, DRAFT_IDS) if self.reduced else head

    def with_draft_vocabulary(self, size: int) -> Self:
        """The same config with an output head of its own, which has logits for ``size`` tokens only."""
        return dataclasses.replace(self, draft_vocab_size=size, own_head=True)  # pyright: ignore

    def resolved_aux_layers(self, target: ModelConfig) -> tuple[int, ...]:
        """The auxiliary hidden states that a feature of ``target`` joins."""
        del target
        return self.aux_layers

    def require_sizes(self):
        """Raise a ValueError unless the target's width and the draft vocabulary are possible sizes."""
        V, Vd = self.layers.vocab_size, self.draft_vocab_size
        require_count("target_hidden_size", self.target_hidden_size)
        require(is_int(Vd) and 1 <= Vd <= V, "draft_vocab_size", Vd, f"an integer in 1..{V}, the target's vocabulary")
        if not self.own_head:
            require(Vd == V, "draft_vocab_size", Vd, f"{V}, the target's vocabulary, because its head is borrowed")

    def has_ascending_aux_layers(self) -> bool:
        """Whether the auxiliary layers are layer ids of at least 0, each larger than the one before."""
        ids = self.aux_layers
        return all(is_int(k) and k >= 0 for k in ids) and list(ids) == sorted(set(ids))

    def require_fit(self, target: ModelConfig):
        """Raise a ValueError unless the head was made for a target of these widths, vocabulary and depth."""
        head: Any = self  # ``method`` is a property of the subclass
        require_same_target(head.method, target, self.target_hidden_size, self.layers.vocab_size)
        ours, theirs, aux_layers = self.layers.hidden_size, target.hidden_size, self.resolved_aux_layers(target)
        if ours != theirs and not (self.own_embedding and self.own_head):
            raise ValueError(
                f"the {head.method} head has a width of {ours} and borrows the embedding or the output head of the "
                f"target, whose width is {theirs}; expected a checkpoint that has its own"
            )
        if aux_layers and aux_layers[-1] > target.num_layers:
            raise ValueError(
                f"the {head.method} head reads auxiliary layers {aux_layers}, and the target has {target.num_layers} "
                "layers; expected the target that the head was trained on"
            )
