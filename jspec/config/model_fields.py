"""The fields of a ``ModelConfig``: the sizes of a decoder and the choices in which decoders differ, and what layer i has."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Literal

from jspec.config.delta_net import DeltaNets
from jspec.config.layer import LAYER_NORMS, LayerConfig
from jspec.config.mla import Latent
from jspec.config.moe import Experts
from jspec.config.param_specs import Declared
from jspec.config.rope import Rope

PLAIN_ROPE = Rope()
HEAD = "head"  # the name of the output head among linear maps, and of an embedding that is tied to it
EMBEDDING = "embedding"  # which is quantised with a tied output head, or if ``other_formats`` names it
PLAIN_HEAD = ((HEAD, None),)  # ``other_formats`` of a model of which the output head alone is not quantised


@dataclasses.dataclass(frozen=True)
class ModelFields(Declared):
    """The fields of ``ModelConfig``, whose docstring describes them, and what follows from them for each layer."""

    architecture: str
    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # N, attention heads
    num_kv_heads: int  # G
    head_dim: int  # H
    max_position: int
    rms_norm_eps: float = 1e-5
    rope: Rope | None = PLAIN_ROPE
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: str | None = None
    layer_ropes: tuple[Rope | None, ...] = ()
    position_offset: int | None = None
    norm: Literal["rms", "rms_wide", "rms_offset", "layer"] = "rms"
    norm_placement: Literal["before", "after", "around", "after_sum"] = "before"
    final_norm: bool = True
    qk_norm_over: Literal["head", "projection"] = "head"
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    gated_mlp: bool = True
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_divisor: float = 1.0
    embedding_size: int | None = None
    experts: Experts | None = None
    attention_sinks: bool = False
    latent: Latent | None = None
    mtp_layers: int = 0
    draft_vocab_size: int | None = None
    layers: tuple[LayerConfig, ...] = ()
    value_norm: bool = False
    layer_scalars: bool = False
    per_layer_inputs: int | None = None
    per_layer_vocab_size: int | None = None
    qk_norm_after_rope: bool = False
    attention_gate: bool = False
    other_formats: tuple[tuple[str, str | None], ...] = ()
    delta_nets: DeltaNets | None = None

    @property
    def dimensions(self) -> Mapping[str, int]:
        """Dimension letter -> size."""
        return {
            "V": self.vocab_size,
            "Vd": self.draft_vocab_size or self.vocab_size,
            "D": self.hidden_size,
            "F": self.intermediate_size,
            "L": self.num_layers,
            "N": self.num_heads,
            "G": self.num_kv_heads,
            "H": self.head_dim,
            "Pe": self.max_position + (self.position_offset or 0),
            "We": self.embedding_size or self.hidden_size,
            "Wl": self.per_layer_inputs or 0,
            "Vl": self.per_layer_vocab_size or self.vocab_size,
            **({} if self.experts is None else self.experts.dimensions(self.hidden_size)),
            **({} if self.latent is None else self.latent.dimensions(self.head_dim)),
            **({} if self.delta_nets is None else self.delta_nets.dimensions),
        }

    def rotary_head(self, layer: int) -> int:
        """Size of the part of a head that the rotary embedding gets; it may rotate only a fraction (``Rope.fraction``)."""
        return self.layer(layer).head_dim if self.latent is None else self.latent.rotated

    def layer(self, number: int) -> LayerConfig:
        """The sizes of a layer, and where its keys and values come from."""
        if self.layers:
            return self.layers[number]
        return LayerConfig(self.head_dim, self.num_kv_heads, self.intermediate_size)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts, in place of the MLP or beside it."""
        return self.experts is not None and (not self.experts.layers or self.experts.layers[layer])

    def has_delta_net(self, layer: int) -> bool:
        """Whether a layer has a gated delta net in the place of attention."""
        return self.delta_nets is not None and self.delta_nets.layers[layer]

    @property
    def head_quantization(self) -> str | None:
        """The format in which the output head is stored, and with it a tied embedding; None if they are not quantised."""
        return self.quantization_of(HEAD)

    @property
    def embedding_quantization(self) -> str | None:
        """The format in which the embedding is stored: that of a tied output head, or its own in ``other_formats``."""
        return self.head_quantization if self.tie_embeddings else self._other_formats.get(EMBEDDING)

    def quantization_of(self, name: str) -> str | None:
        """The format in which the linear map ``name`` is stored; None if it is not quantised."""
        return self._other_formats.get(name, self.quantization)

    def has_own_format(self, name: str) -> bool:
        """Whether ``other_formats`` names the linear map ``name``."""
        return name in self._other_formats

    @functools.cached_property
    def _other_formats(self) -> dict[str, str | None]:
        return dict(self.other_formats)

    @property
    def layer_norms(self) -> tuple[str, ...]:
        """Names of the norms of a layer, in the order in which it applies them."""
        return LAYER_NORMS[self.norm_placement]

    def rope_of(self, layer: int) -> Rope | None:
        """The rotary embedding of a layer; None if it has none."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    def layer_kv_numbers(self, layer: int) -> int:
        """How many numbers a layer caches for a token: keys and values, or latents; 0 if it reads another layer's, or has a
        gated delta net."""
        shape = self.layer(layer)
        if self.has_delta_net(layer):
            return 0
        if self.latent is not None:
            return self.latent.cached
        return 0 if shape.reads_cache_of is not None else 2 * shape.num_kv_heads * shape.head_dim
