"""What the draft heads Domino and LiLiCorr add to a DFlash head: ``BlockConfig.domino`` and ``BlockConfig.lilicorr``."""

import dataclasses
from collections.abc import Mapping

from jspec._validation import is_number, require
from jspec.config.heads.base import require_count
from jspec.config.param_specs import DRAFT_VOCAB, EMBED, ONCE, Axis, Parameter, indices, linear, norm, vector

STATE, INNER, JOINED = Axis("Ds", "gate"), Axis("Di", "gate"), Axis("Dj", "gate")
WIDTH, WIDE, FACTOR = Axis("Dl", "lattice"), Axis("Fl", "lattice"), Axis("Rf", "lattice")
HEADS, ONE, FEATURES = Axis("Nl", "lattice"), Axis("1", "one"), Axis("5", "features")


@dataclasses.dataclass(frozen=True)
class DominoConfig:
    """The sizes of a Domino head's recurrence over the drafts of a block (``jspec.models.heads.domino``).

    Attributes:
      state_size: Ds, of the recurrent state, which has read the anchor and the drafts so far.
      inner_size: Di, to which state and hidden state are mapped before they become an addend of the logits.
      uncorrected: how many drafts, the first of a block, have the logits of their slots alone.

    Example::

        DominoConfig(state_size=64, inner_size=32, uncorrected=1)
    """

    state_size: int
    inner_size: int
    uncorrected: int

    def __post_init__(self):
        require_count("state_size", self.state_size)
        require_count("inner_size", self.inner_size)
        require_count("uncorrected", self.uncorrected, least=0)

    def dimensions(self, hidden_size: int) -> Mapping[str, int]:
        """Sizes of its dimension letters, in a head of this width."""
        return {"Ds": self.state_size, "Di": self.inner_size, "Dj": hidden_size + self.state_size}

    def parameters(self, quantization: str | None) -> tuple[Parameter, ...]:
        """Its parameters, whose linear maps are stored as ``quantization`` says."""
        gates = Axis("3Ds", "gate")

        def of_cell(name: str, tensor: str, inputs: Axis) -> Parameter:
            return Parameter(name, {f"prefix_gru.{tensor}": gates}, (inputs,), quantization=quantization)

        return (
            of_cell("domino.of_token.weight", "weight_ih_l0", EMBED),
            of_cell("domino.of_state.weight", "weight_hh_l0", STATE),
            *linear("domino.inner", {"embed_proj.0": INNER}, JOINED, quantization=quantization),
            *linear("domino.out", {"embed_proj.2": DRAFT_VOCAB}, INNER, quantization=quantization),
        )


@dataclasses.dataclass(frozen=True)
class LiLiCorrConfig:
    """The sizes of the layers by which a LiLiCorr head scores the candidates of a block (``jspec.models.heads.lilicorr``).

    Attributes:
      hidden_size: Dl, width of the layers.
      num_layers, num_heads: how many layers there are, and attention heads in each.
      inner_size: Fl, width of their MLPs.
      factor_size: Rf, of the vectors whose cosine is a score.
      scale: what a cosine is multiplied by.
      eps: the least length by which such a vector is divided.

    Example::

        LiLiCorrConfig(128, num_layers=2, num_heads=4, inner_size=256, factor_size=32, scale=10.0, eps=1e-6)
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    inner_size: int
    factor_size: int
    scale: float
    eps: float

    def __post_init__(self):
        for name in ("hidden_size", "num_layers", "num_heads", "inner_size", "factor_size"):
            require_count(name, getattr(self, name))
        divides = self.hidden_size % self.num_heads == 0
        require(divides, "num_heads", self.num_heads, f"a divisor of the width of the layers, {self.hidden_size}")
        require(is_number(self.scale) and self.scale > 0, "scale", self.scale, "a number above 0")
        require(is_number(self.eps) and 0 < self.eps < 0.5, "eps", self.eps, "a number between 0 and 0.5")

    def dimensions(self, block_size: int, candidates: int) -> Mapping[str, int]:
        """Sizes of its dimension letters, of a block of so many slots with so many candidates each."""
        of_block = {"Sl": block_size - 1, "Cl": candidates, "Bl": 2 * block_size - 1}
        of_layers = {"Dl": self.hidden_size, "Fl": self.inner_size, "Nl": self.num_heads, "Rf": self.factor_size}
        return {**of_block, **of_layers}

    def parameters(self, model_size: int) -> tuple[Parameter, ...]:
        """Its parameters beside a head of this width. They are never quantised."""
        layers, thrice = indices(0, self.num_layers), Axis("3Dl", "lattice")

        def of_map(name: str, tensor: str, out: Axis, read: Axis, copies=ONCE) -> tuple[Parameter, ...]:
            return linear(f"lilicorr.{name}", {f"lilicorr.{tensor}": out}, read, copies, bias=True)

        def table(name: str, *axes: Axis) -> Parameter:
            return Parameter(f"lilicorr.{name}", {f"lilicorr.{name}": axes[0]}, axes[1:])

        each, joined = "lilicorr.layers.{}.", "lilicorr.layers.{}.attn.in_proj_"
        return (
            *(of_map("token_proj", "token_proj", WIDTH, EMBED) if model_size != self.hidden_size else ()),
            *of_map("pass_hidden_proj", "pass_hidden_proj", WIDTH, EMBED),
            *norm("lilicorr.feature_norm", "lilicorr.feature_mlp.0", FEATURES, kind="layer"),
            *of_map("feature_in", "feature_mlp.1", WIDTH, FEATURES),
            *of_map("feature_out", "feature_mlp.3", WIDTH, WIDTH),
            table("slot_embedding", ONE, ONE, Axis("Sl", "slots"), ONE, WIDTH),
            table("rank_embedding", ONE, ONE, ONE, Axis("Cl", "ranks"), WIDTH),
            table("relative_slot_bias", HEADS, Axis("Bl", "slots")),
            table("same_slot_bias", HEADS),
            *of_map("context_proj", "context_proj", WIDTH, EMBED),
            vector(f"{each}attn_norm.weight", f"{each}attn_norm.weight", WIDTH, layers),
            Parameter(f"{each}qkv.weight", {f"{joined}weight": thrice}, (WIDTH,), layers),
            vector(f"{each}qkv.bias", f"{joined}bias", thrice, layers),
            *of_map("layers.{}.out", "layers.{}.attn.out_proj", WIDTH, WIDTH, layers),
            vector(f"{each}mlp_norm.weight", f"{each}mlp_norm.weight", WIDTH, layers),
            *of_map("layers.{}.up", "layers.{}.mlp.0", WIDE, WIDTH, layers),
            *of_map("layers.{}.down", "layers.{}.mlp.2", WIDTH, WIDE, layers),
            *norm("lilicorr.output_norm", "lilicorr.output_norm", WIDTH),
            *norm("lilicorr.anchor_norm", "lilicorr.anchor_norm", WIDTH),
            *of_map("factor_input_proj", "factor_input_proj", WIDTH, thrice),
            *(p for name in ("out_head", "in_head", "anchor_out_head") for p in of_map(name, name, FACTOR, WIDTH)),
        )
