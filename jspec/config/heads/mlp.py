"""The config of an MLP speculator."""

import dataclasses
from collections.abc import Mapping

from jspec.config import ModelConfig, count, require_part, require_quantization
from jspec.config.heads.base import require_count, require_same_target
from jspec.config.param_specs import (
    DRAFT_IDS,
    DRAFT_VOCAB,
    EMBED,
    VOCAB,
    Axis,
    Declared,
    Parameter,
    indices,
    linear,
    matrix,
    vector,
)

INNER = Axis("W", "inner")


@dataclasses.dataclass(frozen=True)
class MLPConfig(Declared):
    """MLP speculator (Wertheimer et al., 2024): a recurrent state that reads one token and drafts one token per stage.

    Attributes:
      vocab_size: V of the target.
      hidden_size: D of the target, ``emb_dim`` in config.json.
      inner_size: W, the width of the state, ``inner_dim`` in config.json.
      num_stages: number of tokens that the speculator was trained to predict, ``n_predict`` in config.json.
      tied: whether all stages share one embedding, one norm and one output head. All stages but the first then also share
        one projection. The first has its own, because it reads the target's hidden state ``[D]`` and not ``[W]``.
      scale_input: whether the target's hidden state is divided by its root mean square before the first stage.
      quantization: the type in which projections and output heads are stored: ``int8``, ``fp8`` or ``int4``. None if
        they are not quantised.
      draft_vocab_size: Vd, the number of tokens for which the output heads give logits. None for all of them.

    Example::

        head = MLPConfig(vocab_size=32, hidden_size=16, inner_size=8, num_stages=4)
    """

    vocab_size: int
    hidden_size: int
    inner_size: int
    num_stages: int
    tied: bool = False
    scale_input: bool = False
    quantization: str | None = None
    draft_vocab_size: int | None = None

    method = "mlp"
    decoder = None
    language_model = None
    borrowable = ()

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "inner_size", "num_stages"):
            require_count(name, getattr(self, name))
        require_quantization(self.quantization)
        require_part("draft_vocab_size", self.draft_vocab_size, self.vocab_size)

    @property
    def trained_drafts(self) -> int:
        return self.num_stages

    @property
    def max_drafts(self) -> int | None:
        """``num_stages``, because each stage has weights of its own. None if the stages share them."""
        return None if self.tied else self.num_stages

    @property
    def dimensions(self) -> Mapping[str, int]:
        V, Vd = self.vocab_size, self.draft_vocab_size
        return {"V": V, "Vd": Vd or V, "D": self.hidden_size, "W": self.inner_size}

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        n, kind = self.num_stages, self.quantization
        stages, later_stages = indices(0, 1 if self.tied else n), indices(1, min(n, 2) if self.tied else n)
        return (
            matrix("embeddings.{}", "speculator.emb.{}.weight", VOCAB, INNER, stages),
            vector("norms.{}.weight", "speculator.ln.{}.weight", INNER, stages),
            vector("norms.{}.bias", "speculator.ln.{}.bias", INNER, stages),
            *linear("heads.{}", {"speculator.head.{}": DRAFT_VOCAB}, INNER, stages, quantization=kind),
            *linear("projections.{}", {"speculator.proj.{}": INNER}, EMBED, indices(0, 1), quantization=kind),
            *linear("projections.{}", {"speculator.proj.{}": INNER}, INNER, later_stages, quantization=kind),
            *((DRAFT_IDS,) if self.reduced else ()),
        )

    @property
    def summary(self) -> str:
        return f"{count(self.num_stages, 'stage')}{', tied' * self.tied}, {self.vocabulary_summary}"

    def require_fit(self, target: ModelConfig):
        require_same_target(self.method, target, self.hidden_size, self.vocab_size)
