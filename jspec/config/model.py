"""The config of a language model: its sizes, and the choices in which decoders differ."""

import dataclasses
from typing import Self

from jspec._validation import is_int
from jspec.config.decoder_params import language_model
from jspec.config.eight_bit_maps import eight_bit_maps
from jspec.config.model_checks import require_valid
from jspec.config.model_fields import ModelFields
from jspec.config.param_specs import Parameter


def count(number: int, noun: str) -> str:
    """``1 layer``, ``2 layers``."""
    return f"{number} {noun}{'s' * (number != 1)}"


@dataclasses.dataclass(frozen=True)
class ModelConfig(ModelFields):
    """The architecture of a decoder, without devices, kernels or sampling.

    It has every property of ``jspec.config.heads.DraftConfig``, because a language model can draft too.

    Attributes:
      architecture: the transformers class, which determines the tensor names of checkpoints
        (``jspec.config.tensor_names``).
      rms_norm_eps: the epsilon of all norms, whatever their kind.
      rope: the rotary embedding of all layers that ``layer_ropes`` does not list otherwise. None for no rotation.
      windows: one entry for each layer: None for full attention, or W for a sliding window of W cache slots, the query
        token's own included.
      quantization: the format in which linear maps and the output head are stored: ``int8``, ``fp8``, ``fp8_block``, or
        one of four bits such as ``int4`` (``jspec.quantization.formats``). With None they are stored as all other weights
        are.
      other_formats: (name of a linear map, its format) for those that are stored otherwise, with None in place of the
        format of one that is not quantised: ``(("layers.3.mlp.down", "int8"), ("head", None))``. ``head`` is the output
        head, with an embedding that is tied to it, and ``embedding`` one that is not, which is quantised only if it is
        listed. ``layers.3.attention.values`` makes the values of a layer a map of their own, which are else in one with
        queries and keys, ``layers.3.attention.qkv``.
      layer_ropes: one rotary embedding for each layer, or None for a layer that does not rotate; ``()`` if ``rope`` is
        that of all layers.
      position_offset: None, or that a learned vector is added to the embedding of each token, row ``p + position_offset``
        of a table for position p.
      norm: ``rms`` (Zhang and Sennrich, 2019), rounded to the model's dtype and then multiplied by the weight;
        ``rms_wide``, which multiplies in fp32 before it rounds; ``rms_offset``, which does so with 1 + weight; ``layer``
        (Ba et al., 2016), with a bias.
      norm_placement: where a layer has norms, with x the residual stream and f the attention or the MLP. ``before``:
        ``x + f(norm(x))``. ``after``: ``x + norm(f(x))``. ``around``: ``x + norm(f(norm(x)))``. ``after_sum``:
        ``norm(x + f(x))``.
      final_norm: whether a norm stands before the output head.
      qk_norm_over: the extent of a norm of queries and keys: one ``head``, or the whole ``projection``, all heads of a
        token.
      activation: of the MLP: ``silu``, ``gelu`` (Hendrycks and Gimpel, 2016), its approximation ``gelu_tanh``, ``relu``.
      gated_mlp: whether the MLP is ``down(activation(gate x) * up x)`` (Shazeer, 2020), or ``down(activation(up x))``.
      attention_scale: what products of queries and keys are multiplied by. None is ``head_dim ** -0.5``.
      attention_softcap: c if these become ``c tanh(s / c)`` before the softmax (Gemma 2, 2024).
      attention_sinks: whether each attention head has a learned score that its softmaxes run over as well, as if it were
        that of one more key, whose value is 0 (gpt-oss, 2025).
      logit_softcap: the same of the logits.
      embedding_multiplier: what embeddings are multiplied by, rounded to the model's dtype.
      residual_multiplier: what the outputs of attention and MLP are multiplied by before they are added.
      logit_divisor: what logits are divided by.
      embedding_size: W if embeddings are W wide, and linear maps lead from them to the layers and from there to the
        output head. None if they are as wide as the layers.
      experts: the mixture of experts that layers have in place of the MLP; None if there is none.
      latent: latents in place of cached keys and values; None if each KV head has its own.
      draft_vocab_size: Vd, the number of tokens for which a draft model's output head has logits; None for all of them,
        which a target needs. The embedding has all tokens and is not tied.
      mtp_layers: number of layers for multi-token prediction (DeepSeek-V3, 2024) that the checkpoint has after the last
        one. They belong to a draft head and not to the model.
      layers: one entry for each layer, where they differ in sizes or some have no keys and values of their own; ``()`` if
        every layer has the sizes of the model. ``layer`` gives the entry of a layer in either case.
      value_norm: whether each head of values goes through a norm without weights.
      layer_scalars: whether each layer multiplies the residual stream by a number of its own at its end.
      per_layer_inputs: Wl, if each layer adds to the residual stream what it makes of Wl numbers of its own, which a table
        has for each token (``jspec.models.per_layer``; Gemma 3n and Gemma 4); None if there is no such table.
      per_layer_vocab_size: the number of tokens in that table; None for ``vocab_size``.
      attention_gate: whether the output of each attention head is multiplied by the sigmoid of a linear map of the
        attention's input, number by number (Qiu et al., "Gated Attention for Large Language Models", 2025).
      qk_norm_after_rope: whether the norms of queries and keys are applied after the rotation (Hunyuan, 2025), and not
        before.
      delta_nets: the gated delta nets that some layers have in the place of attention; None if there are none.
    Example::

        config = ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
            max_position=64,
        )
        print(config.num_parameters, config.weight_bytes(2))
    """

    # Members of ``DraftConfig``; a draft model makes any number of drafts.
    method = "draft_model"
    max_drafts = None
    trained_drafts = None
    borrowable = ()

    def __post_init__(self):
        if not self.windows and is_int(self.num_layers) and 1 <= self.num_layers < 2**31:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        require_valid(self)

    def for_length(self, max_len: int) -> Self:
        """The config for an engine with texts of up to ``max_len`` tokens: see ``Rope.for_length``."""
        ropes = tuple(rope and rope.for_length(max_len) for rope in self.layer_ropes)
        return dataclasses.replace(self, rope=self.rope and self.rope.for_length(max_len), layer_ropes=ropes)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter, declared once: see ``jspec.config.param_specs``."""
        return language_model(self)

    @property
    def decoder(self) -> "ModelConfig":
        """The config of the layers whose keys and values are cached: this one."""
        return self

    @property
    def language_model(self) -> "ModelConfig":
        """The config of the language model that drafts: this one."""
        return self

    @property
    def summary(self) -> str:
        """Its sizes in a few words, ``2 layers, vocabulary 97`` for example."""
        return f"{count(self.num_layers, 'layer')}, {self.vocabulary_summary}"

    def require_fit(self, target: "ModelConfig"):
        """Accept every target; that both have the same tokens is checked by their tokenizers."""

    def with_quantization(self, quantization: str) -> Self:
        """The same config, with linear maps and output head stored as ``quantization`` says, and with ``int4`` some of them
        in int8 (``jspec.config.eight_bit_maps``)."""
        alike = dataclasses.replace(self, quantization=quantization, other_formats=())
        return dataclasses.replace(alike, other_formats=eight_bit_maps(alike)) if quantization == "int4" else alike

    def with_draft_vocabulary(self, size: int) -> Self:
        """The same config with an output head of its own, which has logits for ``size`` tokens only."""
        return dataclasses.replace(self, draft_vocab_size=size, tie_embeddings=False)

    def kv_bytes(self, slots: int, itemsize: int) -> int:
        """Bytes of the keys and values, or latents, of ``slots`` cache slots, at ``itemsize`` bytes a number."""
        return sum(self.layer_kv_numbers(layer) for layer in range(self.num_layers)) * slots * itemsize
