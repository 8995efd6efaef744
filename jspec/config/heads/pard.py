"""The config of a PARD draft model."""

import dataclasses
from collections.abc import Mapping
from typing import Self

from jspec._validation import is_int, require
from jspec.config import ModelConfig
from jspec.config.param_specs import Declared, Parameter


@dataclasses.dataclass(frozen=True)
class PardConfig(Declared):
    """PARD (An et al., 2025): a small language model that was fine-tuned to replace mask tokens in one pass.

    Attributes:
      model: config of the language model.
      mask_token_id: the token that mask slots read, ``pard_token`` in config.json.

    Example::

        from jspec.config import ModelConfig

        model = ModelConfig("LlamaForCausalLM", 32, 16, 32, 2, 2, 1, 8, 64)
        draft = PardConfig(model, mask_token_id=31)
    """

    model: ModelConfig
    mask_token_id: int

    method = "parallel"
    max_drafts = None
    trained_drafts = None
    borrowable = ()

    def __post_init__(self):
        V, mask = self.model.vocab_size, self.mask_token_id
        require(is_int(mask) and 0 <= mask < V, "mask_token_id", mask, f"in 0..{V - 1}")

    @property
    def decoder(self) -> ModelConfig:
        return self.model

    @property
    def language_model(self) -> ModelConfig:
        return self.model

    @property
    def dimensions(self) -> Mapping[str, int]:
        return self.model.dimensions

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.model.parameters

    @property
    def summary(self) -> str:
        return self.model.summary

    def require_fit(self, target: ModelConfig):
        """Accept every target; that both have the same tokens is checked by their tokenizers."""

    @property
    def quantization(self) -> str | None:
        return self.model.quantization

    def with_quantization(self, quantization: str) -> Self:
        """A copy of this config whose linear maps and output head are stored as ``quantization`` says."""
        return dataclasses.replace(self, model=self.model.with_quantization(quantization))

    def with_draft_vocabulary(self, size: int) -> Self:
        """A copy of this config with an output head of its own, which has logits for ``size`` tokens only."""
        return dataclasses.replace(self, model=self.model.with_draft_vocabulary(size))
