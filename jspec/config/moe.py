"""The config of a mixture of experts, which replaces the MLP of a layer."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from jspec._validation import FieldChecks, is_int, is_number, require
from jspec.quantization import mxfp4_pairs


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts (Shazeer et al., 2017). An expert is a gated MLP, and a token goes through a few of them.

    A router gives each expert a logit. The experts with the highest are chosen, and their outputs are added, each times
    its probability. *Shared* experts are experts that every token goes through (DeepSeekMoE, 2024).

    Attributes:
      count: X, how many experts the router chooses from.
      chosen: how many of them the router sends a token to.
      width: Fe, the width of an expert.
      renormalise: whether the weights of the chosen experts add up to ``scale``. Otherwise the weights are ``scale``
        times probabilities among all experts.
      layers: for each layer, whether it has experts; ``()`` if all of them have. The others have an MLP.
      biases: whether router and experts have biases.
      clamp: c if the MLP of an expert is that of gpt-oss, which clamps gate and up (``jspec.pallas.moe.grouped_mlp``);
        else None.
      stored: ``mxfp4`` if the experts are stored in four bits (``jspec.quantization.mxfp4_pairs``). None if they are stored
        as the other weights are, eight bits included.
      scores: ``softmax``: the probability of an expert is that of a softmax over logits, to which the bias of the router
        is added. ``sigmoid``: it is the sigmoid of the expert's own logit (DeepSeek-V3, 2024).
      groups: the experts are this many groups of neighbours, of two or more experts each.
      chosen_groups: how many groups a token may choose from: those whose two best experts have the largest sum.
      scale: the factor of the weights of chosen experts.
      corrected: whether a learned number of each expert is added to its sigmoid when experts are chosen; it does not
        change the weight of a chosen expert.
      shared: how many shared experts there are in addition, X, X + 1, ..., with weight 1. They are stored as the others
        are, and as wide.
      shared_width: Fs, the width of all shared experts together, if they are one MLP with a size or a format of its own and
        ``shared`` is 0; 0 if they are not.
      shared_gate: whether the outputs of shared experts are multiplied by a number of each token, the sigmoid of a linear
        map (Qwen2-MoE, 2024).
      beside_mlp: whether the experts stand beside the MLP of a layer, and not in its place, with norms of their own
        (``jspec.models.moe.MixtureBesideMLP``; Gemma 4, 2026).

    Example::

        qwen3_30b_a3b = Experts(count=128, chosen=8, width=768)
    """

    count: int
    chosen: int
    width: int
    renormalise: bool = True
    layers: tuple[bool, ...] = ()
    biases: bool = False
    clamp: float | None = None
    stored: Literal["mxfp4"] | None = None
    scores: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0
    corrected: bool = False
    shared: int = 0
    shared_width: int = 0
    beside_mlp: bool = False
    shared_gate: bool = False

    def __post_init__(self):
        check = FieldChecks(self, "experts.")
        check.sizes("count", "chosen", "width", "groups", "chosen_groups")
        check.require("chosen", self.chosen <= self.count, f"at most the {self.count} experts that there are")
        flags = isinstance(self.layers, tuple) and all(isinstance(flag, bool) for flag in self.layers)
        check.require("layers", flags, "a tuple of True or False, one a layer")
        check.flags("renormalise", "biases", "corrected", "beside_mlp", "shared_gate")
        clamp = self.clamp
        check.require("clamp", clamp is None or (is_number(clamp) and clamp > 0), "None or a positive number")
        check.require("stored", self.stored in (None, "mxfp4"), "None or 'mxfp4'")
        self._require_routing(check)

    def _require_routing(self, check: FieldChecks):
        known = ("softmax", "sigmoid")
        check.require("scores", self.scores in known, f"one of {', '.join(known)}")
        check.positive("scale")
        for name, size in (("shared", self.shared), ("shared_width", self.shared_width)):
            check.require(name, is_int(size) and 0 <= size < 2**31, "an integer of at least 0")
        shared = self.shared > 0 or self.shared_width > 0
        check.require("shared_width", not (self.shared and self.shared_width), "0 with shared experts among the others")
        groups, size = self.groups, self.count // self.groups
        whole = self.count % groups == 0 and (groups == 1 or size >= 2)
        check.require("groups", whole, f"groups of at least two that the {self.count} experts are dealt to evenly")
        fits = self.chosen_groups <= groups and self.chosen_groups * size >= self.chosen
        together = f"at most {groups} groups, which together have the {self.chosen} experts of a token"
        check.require("chosen_groups", fits, together)
        corrects = not self.corrected or (self.scores == "sigmoid" and not self.biases)
        check.require("corrected", corrects, "False, unless scores are sigmoid and there are no biases")
        alone = self.stored is None and not (self.biases or shared or self.layers or self.scores != "softmax")
        others = "False for experts with biases, in four bits, with sigmoids, shared, or in some layers only"
        check.require("beside_mlp", alone or not self.beside_mlp, others)
        check.require("shared_gate", shared or not self.shared_gate, "False without shared experts")
        plain = not shared or (self.stored is None and not self.biases and self.clamp is None)
        check.require(
            "shared" if self.shared else "shared_width", plain, "0 for experts with biases, clamps or four bits"
        )

    @property
    def per_token(self) -> int:
        """Y, how many experts a token goes through, shared ones included."""
        return self.chosen + self.shared

    @property
    def all(self) -> int:
        """How many experts a layer has, shared ones included."""
        return self.count + self.shared

    def with_shared_apart(self) -> "Experts":
        """The same experts, of which the shared ones are an MLP of their own."""
        return dataclasses.replace(self, shared=0, shared_width=self.shared_width or self.shared * self.width)

    def require_stored_in_groups(self, hidden_size: int):
        """Raise a ValueError unless the inputs of both maps, hidden_size and width, are whole groups of MXFP4."""
        for name, inputs in (("hidden_size", hidden_size), ("experts.width", self.width)):
            whole = f"a multiple of {mxfp4_pairs.GROUP} with experts stored in {self.stored}"
            require(inputs % mxfp4_pairs.GROUP == 0, name, inputs, whole)

    def dimensions(self, hidden_size: int) -> Mapping[str, int]:
        """Dimension letter -> size; hidden_size is D. A row of four-bit weights has ``Dp`` or ``Fp`` pairs of groups."""
        pairs = {"Dp": mxfp4_pairs.num_pairs(hidden_size), "Fp": mxfp4_pairs.num_pairs(self.width)}
        return {"X": self.count, "Fe": self.width, "Fs": self.shared_width, **pairs}
