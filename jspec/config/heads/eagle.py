"""The config of an EAGLE or EAGLE-2 draft head."""

import dataclasses

from jspec.config import ModelConfig, require_part
from jspec.config.decoder_params import decoder_layers
from jspec.config.heads.base import EMBEDDING, TWICE_EMBED, LayeredConfig
from jspec.config.param_specs import EMBED, VOCAB, Parameter, indices, linear, matrix, vector


@dataclasses.dataclass(frozen=True)
class EagleConfig(LayeredConfig):
    """EAGLE and EAGLE-2 (Li et al., 2024): a decoder layer that reads pairs of a token and a feature of the target.

    The feature is the target's hidden state after its final norm. The checkpoints of EAGLE and EAGLE-2 are alike.

    Attributes:
      layers: the decoder layers of the draft head. Their width and vocabulary are those of the target.
      fuse_bias: whether ``fc``, the map of (embedding, feature) to the layers' width ``[2D] -> [D]``, has a bias.
      own_embedding: whether the checkpoint has a token embedding. If not, the target's embedding serves.
      draft_vocab_size: Vd, the number of rows of the target's output head that the draft head has. None if it uses the
        target's output head, for all tokens.
      norms: whether the first layer norms what its attention reads, and the output of the last layer is normed, as NeMo
        Automodel trains them. What the output head reads and the next slot is fed is the normed output.

    Example::

        from jspec.config import ModelConfig

        layers = ModelConfig("LlamaForCausalLM", 32, 16, 32, 1, 2, 1, 8, 64)  # one layer, V = 32, D = 16
        head = EagleConfig(layers, draft_vocab_size=8)
    """

    layers: ModelConfig
    fuse_bias: bool = False
    own_embedding: bool = False
    draft_vocab_size: int | None = None
    norms: bool = False

    method = "eagle"
    max_drafts = None
    trained_drafts = None
    borrowable = (("own_embedding", "embedding"),)

    def __post_init__(self):
        require_part("draft_vocab_size", self.draft_vocab_size, self.layers.vocab_size)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        c = self.layers
        return (
            *((matrix("embedding", EMBEDDING, VOCAB, EMBED),) if self.own_embedding else ()),
            *linear(
                "fuse_in", {"fc": EMBED}, TWICE_EMBED, bias=self.fuse_bias, quantization=c.quantization_of("fuse_in")
            ),
            *decoder_layers(c, indices(0, 1), attention_norms=None if self.norms else {}),
            *decoder_layers(c, indices(1, c.num_layers)),
            *((vector("norm.weight", "norm.weight", EMBED),) if self.norms else ()),
            *self.reduced_head,
        )
