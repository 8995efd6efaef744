"""What a trained draft head is: frozen dataclasses beside ``ModelConfig``, validated when built.

A head drafts for one target: it reads the target's features and borrows its embedding or its output head. In shapes, E
stands for the numbers of a feature and Vd for a reduced draft vocabulary; the other letters are those of
``jspec.config``."""

import dataclasses
from typing import Any

from jspec._arguments import is_int, require
from jspec.config import ModelConfig


def _require_plain(layers: ModelConfig):
    expected = "None: the weights of a head are not quantised, those of its target and of a draft model may be"
    require(layers.quantization is None, "layers.quantization", layers.quantization, expected)


def _require_count(name: str, value: Any, least: int = 1):
    require(is_int(value) and least <= value < 2**31, name, value, f"an integer of at least {least} and below 2^31")


@dataclasses.dataclass(frozen=True)
class EagleConfig:
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
    aux_layers: tuple[int, ...] | None = ()
    max_drafts = None
    trained_drafts = None

    def __post_init__(self):
        _require_plain(self.layers)

    @property
    def num_parameters(self) -> int:
        D, V = self.layers.hidden_size, self.layers.vocab_size
        borrowed = _layers_only(self.layers) - D  # the first layer reads without a norm
        return borrowed + 2 * D * D + D * self.fuse_bias + V * D * self.own_embedding


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
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
    def num_parameters(self) -> int:
        c, D, E = self.layers, self.layers.hidden_size, self.feature_size
        count = _layers_only(c) + (c.num_heads + 2 * c.num_kv_heads) * c.head_dim * D  # the first layer's wider input
        count += D + D * self.norm_before_head  # its second norm, the final norm
        count += (
            D * self.fuse_bias + D * E * bool(self.num_aux_layers) + E * (self.norm_before_fuse or self.norm_each_aux)
        )
        count += c.vocab_size * D * self.own_embedding + self.draft_vocab_size * D * self.own_head
        return count + c.vocab_size * self.reduced + E * (self.mask_token_id is not None)


@dataclasses.dataclass(frozen=True)
class PardConfig:
    """PARD (An et al., 2025): a small language model fine-tuned to fill K mask tokens in one pass.

    Attributes:
      model: the language model.
      mask_token_id: the token of mask slots, ``pard_token`` in its config.json.
    """

    model: ModelConfig
    mask_token_id: int

    method = "parallel"
    aux_layers = None
    max_drafts = None
    trained_drafts = None

    def __post_init__(self):
        V, mask = self.model.vocab_size, self.mask_token_id
        require(is_int(mask) and 0 <= mask < V, "mask_token_id", mask, f"in 0..{V - 1}")

    @property
    def layers(self) -> ModelConfig:
        return self.model

    @property
    def num_parameters(self) -> int:
        return self.model.num_parameters


@dataclasses.dataclass(frozen=True)
class MLPConfig:
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
    aux_layers: tuple[int, ...] | None = ()
    layers = None

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
    def num_parameters(self) -> int:
        V, D, W, n = self.vocab_size, self.hidden_size, self.inner_size, self.num_stages
        sets, deeper = (1, min(n - 1, 1)) if self.tied else (n, n - 1)
        return sets * (2 * V * W + 2 * W) + D * W + deeper * W * W


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
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
    aux_layers: tuple[int, ...] | None = ()
    layers = None
    trained_drafts = None

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
    def num_parameters(self) -> int:
        D, rows = self.hidden_size, self.vocab_size if self.own_head else 0
        return self.num_heads * (self.num_blocks * (D * D + D) + (rows or 0) * D)


HeadConfig = EagleConfig | Eagle3Config | PardConfig | MLPConfig | MedusaConfig


def decoder_of(draft: ModelConfig | HeadConfig | None) -> ModelConfig | None:
    """The decoder layers that a draft keeps keys and values for; None if it keeps none."""
    return draft if draft is None or isinstance(draft, ModelConfig) else draft.layers


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """The residual streams that EAGLE-3 reads of a target of L layers when its checkpoint does not say."""
    return tuple(sorted({2, num_layers // 2, num_layers - 3}))


def resolved_aux_layers(target: ModelConfig, head: EagleConfig | Eagle3Config) -> tuple[int, ...]:
    """The target's residual streams that a feature is made of; () is its hidden state after the final norm."""
    if isinstance(head, EagleConfig) or head.num_aux_layers == 0:
        return ()
    return default_aux_layers(target.num_layers) if head.aux_layers is None else head.aux_layers


def check_head(target: ModelConfig, head: HeadConfig):
    """Raise a ValueError, with both numbers, if a head was made for another target."""
    if isinstance(head, PardConfig):
        return  # a language model: what has to agree is the tokenizer
    width = head.hidden_size if head.layers is None else getattr(head, "target_hidden_size", head.layers.hidden_size)
    vocab = head.vocab_size if head.layers is None else head.layers.vocab_size
    for what, ours, theirs in (("hidden size", width, target.hidden_size), ("vocabulary", vocab, target.vocab_size)):
        if ours is not None and ours != theirs:
            raise ValueError(
                f"the {head.method} head was made for a target with a {what} of {ours}, and this target's is {theirs}; "
                "expected the target that the head was trained on"
            )
    if isinstance(head, Eagle3Config):
        _check_streams(target, head)


def _check_streams(target: ModelConfig, head: Eagle3Config):
    ours, theirs, aux_layers = head.layers.hidden_size, target.hidden_size, resolved_aux_layers(target, head)
    if ours != theirs and not (head.own_embedding and head.own_head):
        raise ValueError(
            f"the {head.method} head has a width of {ours} and borrows the embedding or the output head of the target, "
            f"whose width is {theirs}; expected a checkpoint that has its own"
        )
    if len(aux_layers) != head.num_aux_layers:
        raise ValueError(
            f"the {head.method} head reads {head.num_aux_layers} residual streams and does not say which, and a target of "
            f"{target.num_layers} layers has {len(aux_layers)} by default, {aux_layers}; "
            "expected a config that lists layer ids"
        )
    if aux_layers and (aux_layers[0] < 0 or aux_layers[-1] > target.num_layers):
        raise ValueError(
            f"the {head.method} head reads residual streams {aux_layers}, and the target has {target.num_layers} layers; "
            "expected the target that the head was trained on"
        )


def _layers_only(config: ModelConfig) -> int:
    """Parameters of the decoder layers, without embedding, final norm and head."""
    D, V = config.hidden_size, config.vocab_size
    return config.num_parameters - D - V * D * (1 if config.tie_embeddings else 2)
