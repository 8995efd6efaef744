"""The config of Medusa heads."""

import dataclasses
from collections.abc import Mapping

from jspec.config import ModelConfig, count
from jspec.heads.base import require_count, require_same_target
from jspec.parameters import EMBED, VOCAB, Declared, Parameter, indices, linear


@dataclasses.dataclass(frozen=True)
class MedusaConfig(Declared):
    """Medusa heads (Cai et al., 2024): Medusa head i predicts the token i + 2 places after the one that was just read.

    The target itself predicts the token one place after it, and Medusa head 0 the one after that.

    Attributes:
      vocab_size: V of the target. None if the checkpoint does not say, which is allowed where the target's output head
        serves.
      hidden_size: D of the target.
      num_heads: number of Medusa heads.
      num_blocks: number of residual blocks of each Medusa head.
      own_head: whether each Medusa head has an output head. If not, the target's output head serves for all of them.
    """

    vocab_size: int | None
    hidden_size: int
    num_heads: int
    num_blocks: int = 1
    own_head: bool = True

    method = "medusa"
    decoder = None
    language_model = None
    trained_drafts = None
    borrowable = ()

    def __post_init__(self):
        for name in ("hidden_size", "num_heads"):
            require_count(name, getattr(self, name))
        if self.own_head or self.vocab_size is not None:
            require_count("vocab_size", self.vocab_size)
        require_count("num_blocks", self.num_blocks, least=0)

    @property
    def max_drafts(self) -> int:
        """``num_heads``, because each Medusa head makes one draft."""
        return self.num_heads

    @property
    def dimensions(self) -> Mapping[str, int]:
        return {"V": self.vocab_size or 0, "D": self.hidden_size}

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        heads = indices(0, self.num_heads)
        blocks = tuple((i, j) for i in range(self.num_heads) for j in range(self.num_blocks))
        output = {f"{{}}.{self.num_blocks}": VOCAB}
        return (
            *linear("heads.{}.blocks.{}", {"{}.{}.linear": EMBED}, EMBED, blocks, bias=True),
            *(linear("heads.{}.head", output, EMBED, heads) if self.own_head else ()),
        )

    @property
    def summary(self) -> str:
        known = "the target's output head" if self.vocab_size is None else f"vocabulary {self.vocab_size}"
        return f"{count(self.num_heads, 'head')} of {count(self.num_blocks, 'block')}, {known}"

    def require_fit(self, target: ModelConfig):
        require_same_target(self.method, target, self.hidden_size, self.vocab_size)
