"""The config of multi-head latent attention (MLA)."""

import dataclasses
from collections.abc import Mapping

from jspec._validation import FieldChecks, is_int


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024): the keys and values of all heads follow from one *latent* of a token.

    The cache holds for each token its latent, ``rank`` numbers, and one rotated key of ``rotated`` numbers that all heads
    share. The key of a head is ``[up-projection of the latent | rotated key]``, its value is another up-projection.
    ``ModelConfig.head_dim`` is the size of a query and of a key, both parts together.

    Attributes:
      rank: Ck, the size of a latent.
      rotated: Hr, how many numbers of a query and a key are rotated: the last ones.
      value_dim: Hv, the size of a value.
      query_rank: Cq, the size of the vector from which all queries of a token follow; None if they follow from the hidden
        state itself.
      norm_eps: the epsilon of the norms of both vectors. transformers has 1e-6 whatever ``rms_norm_eps`` says.
      interleaved: whether checkpoints hold the two numbers of a rotary pair side by side. The parameters do not: theirs is
        the order of all other models, so that one rotation serves (``jspec.checkpoints.tensors.parts``).

    Example::

        deepseek_v3 = Latent(rank=512, rotated=64, value_dim=128, query_rank=1536)
    """

    rank: int
    rotated: int
    value_dim: int
    query_rank: int | None = None
    norm_eps: float = 1e-6
    interleaved: bool = True

    def __post_init__(self):
        check, rank = FieldChecks(self, "latent."), self.query_rank
        check.sizes("rank", "rotated", "value_dim")
        check.require("rotated", self.rotated % 2 == 0, "an even number (rotary pairs)")
        known = rank is None or (is_int(rank) and 1 <= rank < 2**31)
        check.require("query_rank", known, "None or an integer of at least 1")
        check.positive("norm_eps")
        check.flags("interleaved")

    def require_fit(self, head_dim: int):
        """Raise a ValueError unless a query of ``head_dim`` numbers has some that are rotated and some that are not."""
        FieldChecks(self, "latent.").require("rotated", self.rotated < head_dim, f"below head_dim, {head_dim}")

    @property
    def cached(self) -> int:
        """Numbers that are cached for a token in a layer."""
        return self.rank + self.rotated

    def dimensions(self, head_dim: int) -> Mapping[str, int]:
        """Dimension letter -> size; ``Cc`` is what is cached, Ck + Hr."""
        return {
            "Ck": self.rank,
            "Cc": self.cached,
            "Cq": self.query_rank or 0,
            "Hr": self.rotated,
            "Hn": head_dim - self.rotated,
            "Hv": self.value_dim,
        }
