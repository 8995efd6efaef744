"""The config of the multi-token prediction layers of a checkpoint."""

import dataclasses

from jspec._validation import require
from jspec.config import ModelConfig, require_part
from jspec.config.decoder_params import by_quantization, decoder_layers
from jspec.config.heads.base import TWICE_EMBED, LayeredConfig
from jspec.config.param_specs import EMBED, Parameter, indices, linear, norm
from jspec.config.tensor_names import names_of


@dataclasses.dataclass(frozen=True)
class MTPConfig(LayeredConfig):
    """Multi-token prediction (DeepSeek-V3, 2024): decoder layers that a model was trained with, to predict further tokens.

    Layer k drafts token k of a round, and the last layer all further ones. Its input fuses the embedding of the newest
    token with a feature: the target's hidden state after its final norm, or the output of the layer that drafted before.
    Embedding and output head are the target's; the layers may have a copy of some rows of the latter.

    Attributes:
      layers: the decoder layers, one or more, each of the target's width and vocabulary.
      norm_output: whether the next layer reads the output of a layer after its final norm, as in transformers, SGLang and
        vLLM's DeepSeek. If not, it reads the output before that norm, as in vLLM's GLM-4.7-Flash (0.33).
      mask_first: whether the embedding is zero where the feature is that of the first token of a text, as in vLLM (0.33).
      draft_vocab_size: Vd, the number of rows of the target's output head that the layers have. None if they use the
        target's output head, for all tokens.

    Example::

        from jspec.config import ModelConfig

        layers = ModelConfig("LlamaForCausalLM", 32, 16, 32, 1, 2, 1, 8, 64)  # one layer, V = 32, D = 16
        head = MTPConfig(layers)
    """

    layers: ModelConfig
    norm_output: bool = True
    mask_first: bool = False
    draft_vocab_size: int | None = None

    method = "mtp"
    max_drafts = None
    trained_drafts = None
    borrowable = ()

    def __post_init__(self):
        for name in ("norm_output", "mask_first"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        ok = self.norm_output or self.layers.num_layers == 1
        require(ok, "norm_output", self.norm_output, "True for several layers, each of which has a norm of its own")
        require_part("draft_vocab_size", self.draft_vocab_size, self.layers.vocab_size)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        c, copies = self.layers, indices(0, self.layers.num_layers)
        norms = {"token_norms": "enorm", "feature_norms": "hnorm", "norms": "shared_head.norm"}
        parameters: tuple[Parameter, ...] = ()
        for kind, group in by_quantization(c, "fuse_in.{}", copies):
            parameters += linear("fuse_in.{}", {"layers.{}.eh_proj": EMBED}, TWICE_EMBED, group, quantization=kind)
        for name, tensor in norms.items():
            parameters += norm(f"{name}.{{}}", f"layers.{{}}.{tensor}", EMBED, copies, kind=c.norm)
        layers = decoder_layers(c, copies, names=names_of(c.architecture))
        return (*parameters, *layers, *self.reduced_head)


def mtp_layers(target: ModelConfig, layers: int) -> ModelConfig:
    """The config of the multi-token prediction layers of ``target``: all with attention, and with experts if it has any."""
    experts = None if target.experts is None else dataclasses.replace(target.experts, layers=())
    return dataclasses.replace(
        target,
        num_layers=layers,
        experts=experts,
        windows=(),
        layer_ropes=(),
        mtp_layers=0,
        tie_embeddings=False,
        quantization=None,
        other_formats=(),
        delta_nets=None,
    )
