"""What a trained draft head is: frozen dataclasses beside ``ModelConfig``, validated when built.

A head drafts for one target: it reads the target's features and borrows its embedding or its output head. In shapes, E
stands for the numbers of a feature, Vd for a reduced draft vocabulary, Dt for the target's width where the head has
another, and W for the state of an MLP speculator; the other letters are those of ``jspec.config``."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, Self

from jspec._arguments import is_int, require
from jspec.config import ModelConfig, count
from jspec.parameters import (
    EMBED,
    VOCAB,
    Axis,
    Declared,
    Parameter,
    decoder_layers,
    indices,
    linear,
    matrix,
    vector,
)

EMBEDDING = "embed_tokens.weight"  # what checkpoints of heads call it
DRAFT_VOCAB, FEATURE = Axis("Vd", "draft_vocab"), Axis("E", "feature")
TARGET_EMBED, INNER = Axis("Dt", "target_embed"), Axis("W", "inner")
TWICE_EMBED = Axis("2D", "embed_pair")  # (embedding, feature) side by side

# What an EAGLE-3 checkpoint may leave open: what its layer ids count, and what its ``norm_output`` means.
AUX_CONVENTIONS = ("input_of", "output_of")
NORM_OUTPUTS = ("recycled", "before_head")


class DraftConfig(Protocol):
    """What the rest of jspec asks of the config of whatever drafts: a language model or a trained head.

    A new kind of head is a frozen dataclass with these, and an entry in ``jspec.registry``."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def method(self) -> str:
        """Name of its entry in ``jspec.registry``."""
        ...

    @property
    def dimensions(self) -> Mapping[str, int]:
        """Dimension letter -> size."""
        ...

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter, declared once: see ``jspec.parameters``."""
        ...

    @property
    def num_parameters(self) -> int:
        """Number of weights; ``jspec.parameters.Declared`` has it and the four that follow."""
        ...

    def weight_bytes(self, itemsize: int) -> int:
        """Bytes of the weights at ``itemsize`` bytes for a number that is not quantised."""
        ...

    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name in the params -> shape, scales left out."""
        ...

    def scale_names(self) -> dict[str, str]:
        """Name of every quantised parameter -> the name of its scales."""
        ...

    def integer_names(self) -> frozenset[str]:
        """Names of the parameters that are int32."""
        ...

    @property
    def decoder(self) -> ModelConfig | None:
        """The decoder layers that keys and values are kept for; None if there are none."""
        ...

    @property
    def language_model(self) -> ModelConfig | None:
        """The whole language model that it is; None for a head, which is nothing without its target."""
        ...

    @property
    def max_drafts(self) -> int | None:
        """Drafts per round that there are weights for; None for any number."""
        ...

    @property
    def trained_drafts(self) -> int | None:
        """Drafts per round that it was trained for, if the checkpoint says."""
        ...

    @property
    def borrowable(self) -> tuple[tuple[str, str], ...]:
        """(field, parameter), for ``own_embedding`` and ``own_head``: the parameter may be a copy of the target's, which
        then serves in its place."""
        ...

    @property
    def summary(self) -> str:
        """Its sizes in a few words, for people."""
        ...

    def require_fit(self, target: ModelConfig):
        """Raise a ValueError, with both numbers, if it was made for another target."""
        ...

    def with_quantization(self, quantization: str) -> Self:
        """The same with linear maps and output head in eight bits, ``int8`` or ``fp8``.

        Raises:
          ValueError: it is a head, whose weights are not quantised.
        """
        ...


class HeadConfig(DraftConfig, Protocol):
    """What drafts and is no plain language model: what a converted folder describes in its manifest."""


def _require_plain(layers: ModelConfig):
    expected = "None: the weights of a head are not quantised, those of its target and of a draft model may be"
    require(layers.quantization is None, "layers.quantization", layers.quantization, expected)


def _require_count(name: str, value: Any, least: int = 1):
    require(is_int(value) and least <= value < 2**31, name, value, f"an integer of at least {least} and below 2^31")


def _require_same_target(method: str, target: ModelConfig, width: int, vocab_size: int | None):
    sizes = (("hidden size", width, target.hidden_size), ("vocabulary", vocab_size, target.vocab_size))
    for what, ours, theirs in sizes:
        if ours is not None and ours != theirs:
            raise ValueError(
                f"the {method} head was made for a target with a {what} of {ours}, and this target's is {theirs}; "
                "expected the target that the head was trained on"
            )


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """The target's hidden states that EAGLE-3 reads when its checkpoint does not say: after 2, L // 2 and L - 3 layers.

    A target too shallow for three different ones gives an early, a middle and a late one: after 1, L // 2 and L - 1.
    """
    L = num_layers
    usual = tuple(sorted({2, L // 2, L - 3}))
    return usual if len(usual) == 3 and usual[0] > 0 else tuple(sorted({1, L // 2, L - 1}))


@dataclasses.dataclass(frozen=True)
class EagleConfig(Declared):
    """EAGLE and EAGLE-2 (Li et al., 2024): one decoder layer over (token, feature) pairs; the same checkpoint for both.

    Attributes:
      layers: its decoder layers; width and vocabulary are the target's.
      fuse_bias: whether the map of (embedding, feature) to the layers' width has a bias.
      own_embedding: whether the checkpoint has an embedding, else the target's serves.
    """

    layers: ModelConfig
    fuse_bias: bool = False
    own_embedding: bool = False

    method = "eagle"
    language_model = None
    max_drafts = None
    trained_drafts = None
    borrowable = (("own_embedding", "embedding"),)

    def __post_init__(self):
        _require_plain(self.layers)

    @property
    def decoder(self) -> ModelConfig:
        return self.layers

    @property
    def dimensions(self) -> Mapping[str, int]:
        return self.layers.dimensions

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        c = self.layers
        return (
            *((matrix("embedding", EMBEDDING, VOCAB, EMBED),) if self.own_embedding else ()),
            *linear("fuse_in", {"fc": EMBED}, TWICE_EMBED, bias=self.fuse_bias),
            *decoder_layers(c, indices(0, 1), norms={}),  # the first layer reads without a norm
            *decoder_layers(c, indices(1, c.num_layers)),
        )

    @property
    def summary(self) -> str:
        return self.layers.summary

    def resolved_aux_layers(self, target: ModelConfig) -> tuple[int, ...]:
        """``()``: a feature is the target's hidden state after its final norm."""
        del target
        return ()

    def require_fit(self, target: ModelConfig):
        _require_same_target(self.method, target, self.layers.hidden_size, self.layers.vocab_size)


@dataclasses.dataclass(frozen=True)
class Eagle3Config(Declared):
    """EAGLE-3 (Li et al., 2025), and with a mask token P-EAGLE (2026), which drafts K tokens in one pass.

    Attributes:
      layers: its decoder layers. The first reads (embedding, feature), twice as wide; vocabulary is the target's.
      draft_vocab_size: Vd, rows of its output head.
      target_hidden_size: width of the target's residual stream.
      num_aux_layers: residual streams that one feature is made of; 0 takes the target's final hidden state as it is.
      aux_layers: which: k is the stream after k layers. None takes 2, L // 2 and L - 3 of the target's L.
      norm_before_fuse: one RMS norm over the joined streams.
      norm_each_aux: an RMS norm over each of them.
      norm_before_residual: the first layer adds to the normed feature.
      norm_output: the normed output is fed back, as EAGLE-3.1 does.
      norm_before_head: the output head reads the normed output, as in nearly every head; if not, there is no final norm.
      fuse_bias: whether the map of the joined streams to the layers' width has a bias.
      own_embedding, own_head: whether the checkpoint has them, else the target's serve.
      mask_token_id: the token of mask slots; None for a sequential head.
      trained_drafts: drafts per round that it was trained for, if the checkpoint says.
    """

    layers: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    num_aux_layers: int = 3
    aux_layers: tuple[int, ...] | None = None
    norm_before_fuse: bool = False
    norm_each_aux: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    norm_before_head: bool = True
    fuse_bias: bool = False
    own_embedding: bool = False
    own_head: bool = True
    mask_token_id: int | None = None
    trained_drafts: int | None = None

    language_model = None
    max_drafts = None

    def __post_init__(self):
        V, Vd = self.layers.vocab_size, self.draft_vocab_size
        _require_plain(self.layers)
        _require_count("target_hidden_size", self.target_hidden_size)
        _require_count("num_aux_layers", self.num_aux_layers, least=0)
        require(is_int(Vd) and 1 <= Vd <= V, "draft_vocab_size", Vd, f"an integer in 1..{V}, the target's vocabulary")
        if not self.own_head:
            require(Vd == V, "draft_vocab_size", Vd, f"{V}, the target's vocabulary, because its head is borrowed")
        if self.num_aux_layers == 0:
            D = self.layers.hidden_size
            require(
                self.target_hidden_size == D, "target_hidden_size", self.target_hidden_size, f"{D}, the head's width"
            )
        if self.aux_layers is not None:
            ordered = all(is_int(k) and k >= 0 for k in self.aux_layers) and list(self.aux_layers) == sorted(
                set(self.aux_layers)
            )
            right = ordered and len(self.aux_layers) == self.num_aux_layers
            require(right, "aux_layers", self.aux_layers, f"{self.num_aux_layers} layer ids of at least 0, ascending")
        if self.norm_before_fuse and self.norm_each_aux:
            raise ValueError("norm_before_fuse and norm_each_aux are both set: expected at most one of them")
        if self.norm_output and not self.norm_before_head:
            raise ValueError("norm_output is set and norm_before_head is not: expected a final norm to feed back from")
        if self.fuse_bias and self.num_aux_layers == 0:
            raise ValueError("fuse_bias is set and num_aux_layers is 0: expected residual streams to fuse")
        if self.trained_drafts is not None:
            _require_count("trained_drafts", self.trained_drafts)
        mask = self.mask_token_id
        require(mask is None or (is_int(mask) and 0 <= mask < V), "mask_token_id", mask, f"None or in 0..{V - 1}")

    @property
    def method(self) -> str:
        return "eagle3" if self.mask_token_id is None else "parallel"

    @property
    def reduced(self) -> bool:
        """Whether the head knows a part of the vocabulary only."""
        return self.draft_vocab_size < self.layers.vocab_size

    @property
    def feature_size(self) -> int:
        """E, numbers of the target per position."""
        return max(self.num_aux_layers, 1) * self.target_hidden_size

    @property
    def decoder(self) -> ModelConfig:
        return self.layers

    @property
    def borrowable(self) -> tuple[tuple[str, str], ...]:
        output = () if self.reduced else (("own_head", "head.weight"),)
        return (("own_embedding", "embedding"), *output)

    @property
    def dimensions(self) -> Mapping[str, int]:
        more = {"Vd": self.draft_vocab_size, "Dt": self.target_hidden_size, "E": self.feature_size}
        return {**self.layers.dimensions, **more}

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        c, norms = self.layers, {"token_norm": "input_layernorm", "feature_norm": "hidden_norm"}
        aux = indices(0, self.num_aux_layers if self.norm_each_aux else 0)
        return (
            *((matrix("embedding", EMBEDDING, VOCAB, EMBED),) if self.own_embedding else ()),
            *(linear("fuse_in", {"fc": EMBED}, FEATURE, bias=self.fuse_bias) if self.num_aux_layers else ()),
            *((vector("fuse_norm.weight", "input_norm.weight", FEATURE),) if self.norm_before_fuse else ()),
            vector("aux_norms.{}.weight", "fc_norm.{}.weight", TARGET_EMBED, aux),
            *decoder_layers(c, indices(0, 1), reads=TWICE_EMBED, norms=norms),
            *decoder_layers(c, indices(1, c.num_layers)),
            *((vector("norm.weight", "norm.weight", EMBED),) if self.norm_before_head else ()),
            *(linear("head", {"lm_head": DRAFT_VOCAB}, EMBED) if self.own_head else ()),
            *((Parameter("draft_ids", {"d2t": VOCAB}, integer=True),) if self.reduced else ()),
            *((vector("mask_hidden", "mask_hidden", FEATURE),) if self.mask_token_id is not None else ()),
        )

    @property
    def summary(self) -> str:
        V, Vd, aux_layers = self.layers.vocab_size, self.draft_vocab_size, self.aux_layers
        vocabulary = f"draft vocabulary {Vd} of {V}" if self.reduced else f"vocabulary {V}"
        streams = "" if aux_layers is None else f", residual streams {', '.join(map(str, aux_layers))}"
        return f"{count(self.layers.num_layers, 'layer')}, {vocabulary}{streams}"

    def resolved_aux_layers(self, target: ModelConfig) -> tuple[int, ...]:
        """The target's hidden states that a feature is made of; () is the one after the final norm."""
        if self.num_aux_layers == 0:
            return ()
        return default_aux_layers(target.num_layers) if self.aux_layers is None else self.aux_layers

    def require_fit(self, target: ModelConfig):
        _require_same_target(self.method, target, self.target_hidden_size, self.layers.vocab_size)
        ours, theirs, aux_layers = self.layers.hidden_size, target.hidden_size, self.resolved_aux_layers(target)
        if ours != theirs and not (self.own_embedding and self.own_head):
            raise ValueError(
                f"the {self.method} head has a width of {ours} and borrows the embedding or the output head of the "
                f"target, whose width is {theirs}; expected a checkpoint that has its own"
            )
        if len(aux_layers) != self.num_aux_layers:
            raise ValueError(
                f"the {self.method} head reads {self.num_aux_layers} residual streams and does not say which, and a "
                f"target of {target.num_layers} layers has {len(aux_layers)} by default, {aux_layers}; "
                "expected a config that lists layer ids"
            )
        if aux_layers and (aux_layers[0] < 0 or aux_layers[-1] > target.num_layers):
            raise ValueError(
                f"the {self.method} head reads residual streams {aux_layers}, and the target has {target.num_layers} "
                "layers; expected the target that the head was trained on"
            )


@dataclasses.dataclass(frozen=True)
class PardConfig(Declared):
    """PARD (An et al., 2025): a small language model fine-tuned to fill K mask tokens in one pass.

    Attributes:
      model: the language model.
      mask_token_id: the token of mask slots, ``pard_token`` in its config.json.
    """

    model: ModelConfig
    mask_token_id: int

    method = "parallel"
    max_drafts = None
    trained_drafts = None
    borrowable = ()

    def __post_init__(self):
        V, mask = self.model.vocab_size, self.mask_token_id
        require(is_int(mask) and 0 <= mask < V, "mask_token_id", mask, f"in 0..{V - 1}")

    @property
    def decoder(self) -> ModelConfig:
        return self.model

    @property
    def language_model(self) -> ModelConfig:
        return self.model

    @property
    def dimensions(self) -> Mapping[str, int]:
        return self.model.dimensions

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.model.parameters

    @property
    def summary(self) -> str:
        return self.model.summary

    def require_fit(self, target: ModelConfig):
        """It fits any target whose tokens it reads alike, which tokenizers show and not configs."""

    def with_quantization(self, quantization: str) -> Self:
        """The same with the model's linear maps and output head stored in eight bits."""
        return dataclasses.replace(self, model=self.model.with_quantization(quantization))


@dataclasses.dataclass(frozen=True)
class MLPConfig(Declared):
    """MLP speculator (Wertheimer et al., 2024): a recurrent state of inner width, one stage a token.

    Attributes:
      vocab_size: V of the target.
      hidden_size: D of the target, ``emb_dim``.
      inner_size: width of the state.
      num_stages: tokens it was trained to predict, ``n_predict``.
      tied: all stages share embedding, norm and head, and all but the first their projection.
      scale_input: the target's hidden state is normed first.
    """

    vocab_size: int
    hidden_size: int
    inner_size: int
    num_stages: int
    tied: bool = False
    scale_input: bool = False

    method = "mlp"
    decoder = None
    language_model = None
    borrowable = ()

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "inner_size", "num_stages"):
            _require_count(name, getattr(self, name))

    @property
    def trained_drafts(self) -> int:
        return self.num_stages

    @property
    def max_drafts(self) -> int | None:
        """Drafts that there are weights for."""
        return None if self.tied else self.num_stages

    @property
    def dimensions(self) -> Mapping[str, int]:
        return {"V": self.vocab_size, "D": self.hidden_size, "W": self.inner_size}

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        n = self.num_stages
        each, deeper = indices(0, 1 if self.tied else n), indices(1, min(n, 2) if self.tied else n)
        return (
            matrix("embeddings.{}", "speculator.emb.{}.weight", VOCAB, INNER, each),
            vector("norms.{}.weight", "speculator.ln.{}.weight", INNER, each),
            vector("norms.{}.bias", "speculator.ln.{}.bias", INNER, each),
            matrix("heads.{}.weight", "speculator.head.{}.weight", VOCAB, INNER, each),
            matrix("projections.{}.weight", "speculator.proj.{}.weight", INNER, EMBED, indices(0, 1)),
            matrix("projections.{}.weight", "speculator.proj.{}.weight", INNER, INNER, deeper),
        )

    @property
    def summary(self) -> str:
        return f"{count(self.num_stages, 'stage')}{', tied' * self.tied}, vocabulary {self.vocab_size}"

    def require_fit(self, target: ModelConfig):
        _require_same_target(self.method, target, self.hidden_size, self.vocab_size)


@dataclasses.dataclass(frozen=True)
class MedusaConfig(Declared):
    """Medusa heads (Cai et al., 2024): head i predicts the token i + 2 places after the one just read.

    Attributes:
      vocab_size: V of the target; None where the target's head serves and the checkpoint does not say.
      hidden_size: D of the target.
      num_heads: heads, each with ``num_blocks`` residual blocks.
      own_head: whether each has an output head of its own, else the target's serves.
    """

    vocab_size: int | None
    hidden_size: int
    num_heads: int
    num_blocks: int = 1
    own_head: bool = True

    method = "medusa"
    decoder = None
    language_model = None
    trained_drafts = None
    borrowable = ()

    def __post_init__(self):
        for name in ("hidden_size", "num_heads"):
            _require_count(name, getattr(self, name))
        if self.own_head or self.vocab_size is not None:
            _require_count("vocab_size", self.vocab_size)
        _require_count("num_blocks", self.num_blocks, least=0)

    @property
    def max_drafts(self) -> int:
        """Drafts that there are weights for."""
        return self.num_heads

    @property
    def dimensions(self) -> Mapping[str, int]:
        return {"V": self.vocab_size or 0, "D": self.hidden_size}

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        heads = indices(0, self.num_heads)
        blocks = tuple((i, j) for i in range(self.num_heads) for j in range(self.num_blocks))
        output = {f"{{}}.{self.num_blocks}": VOCAB}
        return (
            *linear("heads.{}.blocks.{}", {"{}.{}.linear": EMBED}, EMBED, blocks, bias=True),
            *(linear("heads.{}.head", output, EMBED, heads) if self.own_head else ()),
        )

    @property
    def summary(self) -> str:
        known = "the target's output head" if self.vocab_size is None else f"vocabulary {self.vocab_size}"
        return f"{count(self.num_heads, 'head')} of {count(self.num_blocks, 'block')}, {known}"

    def require_fit(self, target: ModelConfig):
        _require_same_target(self.method, target, self.hidden_size, self.vocab_size)
