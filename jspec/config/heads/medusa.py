"""The config of Medusa heads."""

import dataclasses
from collections.abc import Mapping

from jspec.config import ModelConfig, count, require_part, require_quantization
from jspec.config.heads.base import require_count, require_same_target
from jspec.config.param_specs import DRAFT_IDS, DRAFT_VOCAB, EMBED, Declared, Parameter, indices, linear


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
      quantization: the type in which blocks and output heads are stored: ``int8``, ``fp8`` or ``int4``. None if they
        are not quantised.
      draft_vocab_size: Vd, the number of tokens for which the output heads, or the rows that the Medusa heads have of the
        target's output head, give logits. None for all of them.

    Example::

        head = MedusaConfig(vocab_size=32, hidden_size=16, num_heads=3)
    """

    vocab_size: int | None
    hidden_size: int
    num_heads: int
    num_blocks: int = 1
    own_head: bool = True
    quantization: str | None = None
    draft_vocab_size: int | None = None

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
        require_quantization(self.quantization)
        require_part("draft_vocab_size", self.draft_vocab_size, self.vocab_size)

    @property
    def max_drafts(self) -> int:
        """``num_heads``, because each Medusa head makes one draft."""
        return self.num_heads

    @property
    def dimensions(self) -> Mapping[str, int]:
        V = self.vocab_size or 0
        return {"V": V, "Vd": self.draft_vocab_size or V, "D": self.hidden_size}

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        heads, kind = indices(0, self.num_heads), self.quantization
        blocks = tuple((i, j) for i in range(self.num_heads) for j in range(self.num_blocks))
        output = {f"{{}}.{self.num_blocks}": DRAFT_VOCAB}
        shared = linear("head", {"lm_head": DRAFT_VOCAB}, EMBED, quantization=kind) if self.reduced else ()
        return (
            *linear("heads.{}.blocks.{}", {"{}.{}.linear": EMBED}, EMBED, blocks, bias=True, quantization=kind),
            *(linear("heads.{}.head", output, EMBED, heads, quantization=kind) if self.own_head else shared),
            *((DRAFT_IDS,) if self.reduced else ()),
        )

    @property
    def summary(self) -> str:
        known = "the target's output head" if self.vocab_size is None else self.vocabulary_summary
        return f"{count(self.num_heads, 'head')} of {count(self.num_blocks, 'block')}, {known}"

    def require_fit(self, target: ModelConfig):
        require_same_target(self.method, target, self.hidden_size, self.vocab_size)
