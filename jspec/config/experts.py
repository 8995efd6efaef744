"""What a mixture of experts has in place of the MLP of a layer."""

import dataclasses

from jspec._arguments import is_int, require


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts (Shazeer et al., 2017). An expert is a gated MLP, and a token goes through a few of them.

    A router gives each expert a logit. The experts with the highest are chosen, and their outputs are added, each times
    its probability.

    Attributes:
      count: X, how many experts a layer has.
      chosen: Y, how many of them a token goes through.
      width: Fe, the width of an expert.
      renormalise: whether the probabilities of the chosen experts are divided by their sum.
      layers: for each layer, whether it has experts; ``()`` if all of them have. The others have an MLP.
    """

    count: int
    chosen: int
    width: int
    renormalise: bool = True
    layers: tuple[bool, ...] = ()

    def __post_init__(self):
        for name in ("count", "chosen", "width"):
            value = getattr(self, name)
            require(is_int(value) and 1 <= value < 2**31, f"experts.{name}", value, "an integer of at least 1")
        require(
            self.chosen <= self.count, "experts.chosen", self.chosen, f"at most the {self.count} experts that there are"
        )
        flags = isinstance(self.layers, tuple) and all(isinstance(one, bool) for one in self.layers)
        require(flags, "experts.layers", self.layers, "a tuple of True or False, one a layer")
        require(isinstance(self.renormalise, bool), "experts.renormalise", self.renormalise, "True or False")
