"""The config of an MLP speculator."""

import dataclasses
from collections.abc import Mapping

from jspec.config import ModelConfig, count
from jspec.heads.base import require_count, require_same_target
from jspec.parameters import EMBED, VOCAB, Axis, Declared, Parameter, indices, matrix, vector

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
    """

    vocab_size: int
    hidden_size: int
    inner_size: int
    num_stages: int
    tied: bool = False
    scale_input: bool = False

    method = "mlp"
    decoder = None
    language_model = None
    borrowable = ()

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "inner_size", "num_stages"):
            require_count(name, getattr(self, name))

    @property
    def trained_drafts(self) -> int:
        return self.num_stages

    @property
    def max_drafts(self) -> int | None:
        """``num_stages``, because each stage has weights of its own. None if the stages share them."""
        return None if self.tied else self.num_stages

    @property
    def dimensions(self) -> Mapping[str, int]:
        return {"V": self.vocab_size, "D": self.hidden_size, "W": self.inner_size}

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        n = self.num_stages
        stages, later_stages = indices(0, 1 if self.tied else n), indices(1, min(n, 2) if self.tied else n)
        return (
            matrix("embeddings.{}", "speculator.emb.{}.weight", VOCAB, INNER, stages),
            vector("norms.{}.weight", "speculator.ln.{}.weight", INNER, stages),
            vector("norms.{}.bias", "speculator.ln.{}.bias", INNER, stages),
            matrix("heads.{}.weight", "speculator.head.{}.weight", VOCAB, INNER, stages),
            matrix("projections.{}.weight", "speculator.proj.{}.weight", INNER, EMBED, indices(0, 1)),
            matrix("projections.{}.weight", "speculator.proj.{}.weight", INNER, INNER, later_stages),
        )

    @property
    def summary(self) -> str:
        return f"{count(self.num_stages, 'stage')}{', tied' * self.tied}, vocabulary {self.vocab_size}"

    def require_fit(self, target: ModelConfig):
        require_same_target(self.method, target, self.hidden_size, self.vocab_size)
