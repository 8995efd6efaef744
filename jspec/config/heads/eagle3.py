"""The config of an EAGLE-3 or P-EAGLE draft head."""

import dataclasses

from jspec._validation import is_int, require
from jspec.config import ModelConfig
from jspec.config.decoder_params import decoder_layers
from jspec.config.heads.auxiliary import FEATURE, AuxiliaryConfig
from jspec.config.heads.base import TWICE_EMBED, require_count
from jspec.config.param_specs import EMBED, Axis, Parameter, indices, linear, vector

TARGET_EMBED = Axis("Dt", "target_embed")

# Two settings that an EAGLE-3 checkpoint may leave open. ``jspec.checkpoints.layouts.options`` explains their values.
AUX_CONVENTIONS = ("input_of", "output_of")  # whether layer id k means the input or the output of layer k
NORM_OUTPUTS = ("recycled", "before_head")  # ``norm_output`` norms what is fed back, or what the output head reads


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """The auxiliary layers of an EAGLE-3 head whose checkpoint does not list them, for a target with L layers.

    They are the residual streams after 2, L // 2 and L - 3 layers, as in vLLM: ``(2, 16, 29)`` for 32
    layers. In a target too shallow for three different ones, they are those after 1, L // 2 and L - 1 layers:
    ``(1, 3, 5)`` for 6.
    """
    L = num_layers
    usual = tuple(sorted({2, L // 2, L - 3}))
    return usual if len(usual) == 3 and usual[0] > 0 else tuple(sorted({1, L // 2, L - 1}))


@dataclasses.dataclass(frozen=True)
class Eagle3Config(AuxiliaryConfig):
    """EAGLE-3 (Li et al., 2025) and P-EAGLE (2026): decoder layers over pairs of a token and a feature of the target.

    The feature joins auxiliary hidden states: the target's residual streams after some of its layers, side by side
    ``[E]``, which a linear map fuses to the draft head's width ``[D]``. A draft head with a mask token is a P-EAGLE head:
    it drafts K tokens in one pass.

    Attributes:
      layers: the decoder layers. The attention of the first reads (embedding, feature) ``[2D]``. The vocabulary is the
        target's, V.
      draft_vocab_size: Vd, how many tokens the draft head's output head has logits for.
      target_hidden_size: Dt, width of the target's residual stream.
      num_aux_layers: number of auxiliary hidden states that one feature joins. With 0, the feature is the target's hidden
        state after its final norm, and it is not fused.
      aux_layers: which auxiliary hidden states: k is the residual stream after k layers of the target. None takes
        ``default_aux_layers``.
      norm_before_fuse: whether one RMS norm is applied to the joined states ``[E]`` before they are fused.
      norm_each_aux: whether each auxiliary hidden state ``[Dt]`` has an RMS norm before they are joined.
      norm_before_residual: whether the first layer adds its attention to the normed feature. If not, it adds to the
        feature as it was fused.
      norm_output: whether the next pass reads the draft head's output after the final norm, as in EAGLE-3.1. If not, it
        reads the output before that norm.
      norm_before_head: whether a final norm stands before the output head, as in nearly every checkpoint. If not, there
        is no final norm.
      fuse_bias: whether the linear map that fuses the states has a bias.
      own_embedding, own_head: whether the checkpoint has a token embedding and an output head. If not, the target's
        serve.
      mask_token_id: the token that mask slots read. None for an EAGLE-3 head, which has no mask slots.
      trained_drafts: number of drafts per round that the draft head was trained for. None if the checkpoint does not say.

    Example::

        from jspec.config import ModelConfig

        layers = ModelConfig("LlamaForCausalLM", 32, 16, 32, 1, 2, 1, 8, 64)  # one layer, V = 32, D = 16
        head = Eagle3Config(layers, draft_vocab_size=8, target_hidden_size=16, aux_layers=(1, 2, 3))
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
        self.require_sizes()
        require_count("num_aux_layers", self.num_aux_layers, least=0)
        if self.num_aux_layers == 0:
            D, Dt = self.layers.hidden_size, self.target_hidden_size
            require(Dt == D, "target_hidden_size", Dt, f"{D}, the head's width")
        if self.aux_layers is not None:
            right = self.has_ascending_aux_layers() and len(self.aux_layers) == self.num_aux_layers
            require(right, "aux_layers", self.aux_layers, f"{self.num_aux_layers} layer ids of at least 0, ascending")
        if self.norm_before_fuse and self.norm_each_aux:
            raise ValueError("norm_before_fuse and norm_each_aux are both set: expected at most one of them")
        if self.norm_output and not self.norm_before_head:
            raise ValueError("norm_output is set and norm_before_head is not: expected a final norm to feed back from")
        if self.fuse_bias and self.num_aux_layers == 0:
            raise ValueError("fuse_bias is set and num_aux_layers is 0: expected auxiliary hidden states to fuse")
        if self.trained_drafts is not None:
            require_count("trained_drafts", self.trained_drafts)
        V, mask = self.layers.vocab_size, self.mask_token_id
        require(mask is None or (is_int(mask) and 0 <= mask < V), "mask_token_id", mask, f"None or in 0..{V - 1}")

    @property
    def method(self) -> str:
        return "eagle3" if self.mask_token_id is None else "parallel"

    @property
    def feature_size(self) -> int:
        return max(self.num_aux_layers, 1) * self.target_hidden_size

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        c = self.layers
        norms = {"token_norm": "input_layernorm", "feature_norm": "hidden_norm"}
        kind = c.quantization_of("fuse_in")
        fuse_in = linear("fuse_in", {"fc": EMBED}, FEATURE, bias=self.fuse_bias, quantization=kind)
        aux = indices(0, self.num_aux_layers if self.norm_each_aux else 0)
        return (
            *self.embedding,
            *(fuse_in if self.num_aux_layers else ()),
            *((vector("fuse_norm.weight", "input_norm.weight", FEATURE),) if self.norm_before_fuse else ()),
            vector("aux_norms.{}.weight", "fc_norm.{}.weight", TARGET_EMBED, aux),
            *decoder_layers(c, indices(0, 1), attention_inputs=TWICE_EMBED, attention_norms=norms),
            *decoder_layers(c, indices(1, c.num_layers)),
            *((vector("norm.weight", "norm.weight", EMBED),) if self.norm_before_head else ()),
            *self.output_head,
            *((vector("mask_hidden", "mask_hidden", FEATURE),) if self.mask_token_id is not None else ()),
        )

    @property
    def summary(self) -> str:
        aux = "" if self.aux_layers is None else f", auxiliary layers {', '.join(map(str, self.aux_layers))}"
        return f"{super().summary}{aux}"

    def resolved_aux_layers(self, target: ModelConfig) -> tuple[int, ...]:
        """The auxiliary hidden states that a feature of ``target`` joins. ``()`` is the state after the final norm."""
        if self.num_aux_layers == 0:
            return ()
        return default_aux_layers(target.num_layers) if self.aux_layers is None else self.aux_layers

    def require_fit(self, target: ModelConfig):
        super().require_fit(target)
        aux_layers = self.resolved_aux_layers(target)
        if len(aux_layers) != self.num_aux_layers:
            raise ValueError(
                f"the {self.method} head reads {self.num_aux_layers} auxiliary hidden states and does not say which, and a "
                f"target of {target.num_layers} layers has {len(aux_layers)} by default, {aux_layers}; "
                "expected a config that lists layer ids"
            )
