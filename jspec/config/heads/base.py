"""Protocols of drafter configs, the base of heads with decoder layers, and shared axes and checks."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, Self

from jspec._validation import is_int, require
from jspec.config import ModelConfig, count
from jspec.config.param_specs import DRAFT_IDS, DRAFT_VOCAB, EMBED, Axis, Declared, Parameter, StoredParam, linear

EMBEDDING = "embed_tokens.weight"  # name of the token embedding in checkpoints of draft heads

# (embedding, feature) side by side: the input of EAGLE's ``fc`` and of EAGLE-3's first attention.
TWICE_EMBED = Axis("2D", "embed_pair")


class DraftConfig(Protocol):
    """The properties that every drafter's config has, whether it describes a language model or a draft head.

    The rest of jspec uses only these. A new kind of draft head is therefore a frozen dataclass with these properties and
    an entry in ``jspec.registry``.

    Example::

        from jspec.config.heads import MLPConfig

        config: DraftConfig = MLPConfig(vocab_size=32, hidden_size=16, inner_size=8, num_stages=4)
        print(config.method, [parameter.name for parameter in config.parameters])
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def method(self) -> str:
        """Name of the drafting method, as its entry in ``jspec.registry`` has it."""
        ...

    @property
    def dimensions(self) -> Mapping[str, int]:
        """Size of each dimension letter, such as ``{"D": 4096, "V": 128256}``."""
        ...

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Declarations of all parameters, from which the next five members follow: see ``jspec.config.param_specs``."""
        ...

    @property
    def num_parameters(self) -> int:
        """Number of weights and biases. ``jspec.config.param_specs.Declared`` implements this and the next four."""
        ...

    def weight_bytes(self, itemsize: int) -> int:
        """Bytes of all parameters, where a number that is not quantised takes ``itemsize`` bytes."""
        ...

    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter by its name in the params. The scales of quantised weights are left out."""
        ...

    def stored_params(self) -> dict[str, StoredParam]:
        """How each quantised parameter is stored, by its name."""
        ...

    def param_dtypes(self) -> dict[str, str]:
        """Dtype of each parameter that has not the dtype of the weights, by its name."""
        ...

    @property
    def decoder(self) -> ModelConfig | None:
        """Config of the decoder layers whose keys and values are cached. None if the drafter caches nothing."""
        ...

    @property
    def language_model(self) -> ModelConfig | None:
        """Config of the language model, if a whole language model drafts. None for a draft head, which needs its target."""
        ...

    @property
    def max_drafts(self) -> int | None:
        """Largest number of drafts per round that the weights allow. None if they allow any number."""
        ...

    @property
    def trained_drafts(self) -> int | None:
        """Number of drafts per round that the drafter was trained for. None if its checkpoint does not say."""
        ...

    @property
    def borrowable(self) -> tuple[tuple[str, str], ...]:
        """Pairs (field, parameter), where the parameter may be a copy of the target's.

        An example is ``("own_embedding", "embedding")``. A checkpoint may hold a copy of the target's embedding. Loading
        then drops the copy and sets the field to False, so that the target's embedding is used.
        """
        ...

    @property
    def summary(self) -> str:
        """The sizes in a few words, such as ``1 layer, draft vocabulary 32000 of 128256``."""
        ...

    def require_fit(self, target: ModelConfig):
        """Raise a ValueError that names both sizes if the drafter was made for another target."""
        ...

    @property
    def quantization(self) -> str | None:
        """The format in which most linear maps are stored, ``int8`` for example; None if they are not quantised."""
        ...

    @property
    def formats(self) -> str:
        """The names of the formats of its quantised parameters, in words: ``fp8 and nvfp4``; empty if none is."""
        ...

    @property
    def reduced(self) -> bool:
        """Whether the draft vocabulary is reduced, Vd < V. The parameter ``draft_ids`` lists its tokens."""
        ...

    def with_quantization(self, quantization: str) -> Self:
        """A copy of this config whose linear maps and output head are stored as ``int8``, ``fp8`` or ``int4``."""
        ...

    def with_draft_vocabulary(self, size: int) -> Self:
        """A copy of this config whose output head has logits for ``size`` tokens only.

        Raises:
          ValueError: it has no output head that could be reduced, or ``size`` does not fit.
        """
        ...


class HeadConfig(DraftConfig, Protocol):
    """The config of a draft head or a PARD model: every drafter with a checkpoint but a plain language model.

    A converted folder describes it in its manifest.

    Example::

        from jspec.config.heads import MLPConfig

        config: HeadConfig = MLPConfig(vocab_size=32, hidden_size=16, inner_size=8, num_stages=4)
        print(config.dimensions["V"], config.summary)
    """


class LayeredConfig(Declared):
    """Base of the configs of draft heads with decoder layers. Their other linear maps are quantised if the layers are.

    By default a head reads the target's hidden state after its final norm, has the target's width, and drafts all tokens
    with the target's output head, or ``draft_vocab_size`` of them with rows of its own.
    """

    layers: ModelConfig
    draft_vocab_size: Any  # int, or None for all tokens
    language_model = None

    @property
    def decoder(self) -> ModelConfig:
        return self.layers

    @property
    def dimensions(self) -> Mapping[str, int]:
        return {**self.layers.dimensions, "Vd": self.draft_vocab_size or self.layers.vocab_size}

    @property
    def summary(self) -> str:
        return f"{count(self.layers.num_layers, 'layer')}, {self.vocabulary_summary}"

    @property
    def reduced_head(self) -> tuple[Parameter, ...]:
        """The rows of the target's output head, and their token ids, of a head with a reduced vocabulary; else none."""
        head = linear("head", {"lm_head": DRAFT_VOCAB}, EMBED, quantization=self.layers.head_quantization)
        return (*head, DRAFT_IDS) if self.reduced else ()

    def resolved_aux_layers(self, target: ModelConfig) -> tuple[int, ...]:
        """Layers of the auxiliary hidden states that a feature of ``target`` joins; ``()`` is the state after the final
        norm."""
        del target
        return ()

    def require_fit(self, target: ModelConfig):
        """Raise a ValueError unless width and vocabulary are those of ``target``."""
        head: Any = self  # ``method`` is a class variable or a property of the subclass
        require_same_target(head.method, target, self.layers.hidden_size, self.layers.vocab_size)

    @property
    def quantization(self) -> str | None:
        return self.layers.quantization

    def with_quantization(self, quantization: str) -> Self:
        return dataclasses.replace(self, layers=self.layers.with_quantization(quantization))  # pyright: ignore


def require_count(name: str, value: Any, least: int = 1):
    """Raise a ValueError unless ``value`` is an integer in ``least .. 2^31 - 1``."""
    require(is_int(value) and least <= value < 2**31, name, value, f"an integer of at least {least} and below 2^31")


def require_same_target(method: str, target: ModelConfig, width: int, vocab_size: int | None):
    """Raise a ValueError if a draft head was made for a target of another width or vocabulary.

    Args:
      method: name of the drafting method, for the message.
      target: the target that the draft head is to draft for.
      width: width of the target that the draft head was made for.
      vocab_size: vocabulary of that target. None if the checkpoint does not say.
    """
    sizes = (("hidden size", width, target.hidden_size), ("vocabulary", vocab_size, target.vocab_size))
    for what, ours, theirs in sizes:
        if ours is not None and ours != theirs:
            raise ValueError(
                f"the {method} head was made for a target with a {what} of {ours}, and this target's is {theirs}; "
                "expected the target that the head was trained on"
            )
