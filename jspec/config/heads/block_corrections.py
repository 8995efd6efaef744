"""What the draft heads Domino and LiLiCorr add to a DFlash head: ``BlockConfig.domino`` and ``BlockConfig.lilicorr``."""

import dataclasses
from collections.abc import Callable, Mapping

from jspec._validation import is_number, require
from jspec.config.heads.base import require_count
from jspec.config.param_specs import DRAFT_VOCAB, EMBED, ONCE, Axis, Parameter, indices

# The parameters of a LiLiCorr head and the sizes of their axes. A name that ends with a dot stands for weight and bias of a
# linear map. Tensors have the same names, but for ``in_proj_`` in place of ``in_proj.``.
_LILICORR = """
    pass_hidden_proj.:Dl,D context_proj.:Dl,D factor_input_proj.:Dl,3Dl out_head.:Rf,Dl in_head.:Rf,Dl anchor_out_head.:Rf,Dl
    feature_mlp.0.weight:5 feature_mlp.0.bias:5 feature_mlp.1.:Dl,5 feature_mlp.3.:Dl,Dl
    slot_embedding:1,1,Sl,1,Dl rank_embedding:1,1,1,Cl,Dl relative_slot_bias:Nl,Bl same_slot_bias:Nl
    layers.{}.attn_norm.weight:Dl layers.{}.attn.in_proj.:3Dl,Dl layers.{}.attn.out_proj.:Dl,Dl
    layers.{}.mlp_norm.weight:Dl layers.{}.mlp.0.:Fl,Dl layers.{}.mlp.2.:Dl,Fl output_norm.weight:Dl anchor_norm.weight:Dl
"""
_TOKEN_PROJ = "token_proj.:Dl,D"  # where the widths of head and layers differ


@dataclasses.dataclass(frozen=True)
class DominoConfig:
    """The sizes of a Domino head's recurrence over the drafts of a block (``jspec.models.heads.domino``).

    Attributes:
      state_size: Ds, of the recurrent state, which has read the anchor and the drafts so far.
      inner_size: Di, to which state and hidden state are mapped before they become an addend of the logits.
      uncorrected: how many drafts, the first of a block, have the logits of their slots alone.
    """

    state_size: int
    inner_size: int
    uncorrected: int

    def __post_init__(self):
        for name, least in (("state_size", 1), ("inner_size", 1), ("uncorrected", 0)):
            require_count(name, getattr(self, name), least)

    def dimensions(self, hidden_size: int) -> Mapping[str, int]:
        """Sizes of its dimension letters, in a head of this width."""
        return {"Ds": self.state_size, "Di": self.inner_size, "Dj": hidden_size + self.state_size}

    def parameters(self, quantization_of: Callable[[str], str | None]) -> tuple[Parameter, ...]:
        """Its parameters, all of which are linear maps, each stored as ``quantization_of`` its name says."""
        gates, state, inner, joined = (Axis(size, "domino") for size in ("3Ds", "Ds", "Di", "Dj"))
        maps = (
            ("of_token", "prefix_gru.weight_ih_l0", gates, EMBED),
            ("of_state", "prefix_gru.weight_hh_l0", gates, state),
            ("inner", "embed_proj.0.weight", inner, joined),
            ("out", "embed_proj.2.weight", DRAFT_VOCAB, inner),
        )
        return tuple(
            Parameter(f"domino.{name}.weight", {tensor: out}, (read,), quantization=quantization_of(f"domino.{name}"))
            for name, tensor, out, read in maps
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
        require(self.num_layers <= 4096, "num_layers", self.num_layers, "at most 4096")
        divides = self.hidden_size % self.num_heads == 0
        require(divides, "num_heads", self.num_heads, f"a divisor of the width of the layers, {self.hidden_size}")
        require(is_number(self.scale) and self.scale > 0, "scale", self.scale, "a number above 0")
        require(is_number(self.eps) and 0 < self.eps < 0.5, "eps", self.eps, "a number between 0 and 0.5")

    def dimensions(self, block_size: int, candidates: int) -> Mapping[str, int]:
        """Sizes of its dimension letters, of a block of so many slots with so many candidates each."""
        of_layers = {"Dl": self.hidden_size, "Fl": self.inner_size, "Nl": self.num_heads, "Rf": self.factor_size}
        return {**of_layers, "Sl": block_size - 1, "Cl": candidates, "Bl": 2 * block_size - 1}

    def parameters(self, model_size: int) -> tuple[Parameter, ...]:
        """Its parameters beside a head of this width. They are never quantised."""
        declared, layers = [], indices(0, self.num_layers)
        table = _LILICORR if model_size == self.hidden_size else _LILICORR + _TOKEN_PROJ
        for name, sizes in (row.split(":") for row in table.split()):
            axes = [EMBED if size == "D" else Axis(size, "lilicorr") for size in sizes.split(",")]
            for part, used in (("weight", axes), ("bias", axes[:1])) if name.endswith(".") else (("", axes),):
                whole, copies = f"lilicorr.{name}{part}", layers if "{}" in name else ONCE
                tensor = whole.replace(".in_proj.", ".in_proj_")
                declared.append(Parameter(whole, {tensor: used[0]}, tuple(used[1:]), copies))
        return tuple(declared)
