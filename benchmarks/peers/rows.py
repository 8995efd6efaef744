"""What is compared: shapes, formats of their weights, and ways to draft."""

import dataclasses
from typing import Literal

from benchmarks.shapes import GPT_OSS_20B, LLAMA_8B, QWEN3_30B_A3B, QWEN36_27B, QWEN36_35B_A3B, TINY
from jspec.config import ModelConfig
from jspec.config.model_fields import PLAIN_HEAD

DRAFTS, ACCEPTANCE = 4, 0.7  # drafts of a round, and the probability that one is accepted if those before it were
BATCHES = 1, 16, 64


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
      title: what is timed, for readers.
      shape: of the target, with weights in bfloat16.
      stored: the format of its linear maps but the output head; None for bfloat16.
      method: how drafts are made; None for plain decoding.
      prompt: tokens of each row when the timed rounds begin.
      new: tokens that a row gets in them, about.
    """

    title: str
    shape: ModelConfig
    stored: Literal["int4", "fp8", "fp8_block", "nvfp4"] | None = None
    method: Literal["mtp", "eagle"] | None = None
    prompt: int = 512
    new: int = 256

    @property
    def target(self) -> ModelConfig:
        """The shape with weights stored as published checkpoints have them, whose output heads are not quantised."""
        if self.stored is None:
            return self.shape
        return dataclasses.replace(self.shape, quantization=self.stored, other_formats=PLAIN_HEAD)


def _hybrid(title: str, shape: ModelConfig, **how) -> Row:
    return Row(title, shape, prompt=1024, new=128, **how)


ROWS = {
    "27b": _hybrid("Qwen3.6-27B, bf16", QWEN36_27B),
    "27b-mtp": _hybrid("Qwen3.6-27B, bf16, MTP, 4 drafts", QWEN36_27B, method="mtp"),
    "35b": _hybrid("Qwen3.6-35B-A3B, bf16", QWEN36_35B_A3B),
    "35b-fp8-block": _hybrid("Qwen3.6-35B-A3B, FP8 in blocks", QWEN36_35B_A3B, stored="fp8_block"),
    "30b-int4": Row("Qwen3-30B-A3B, int4", QWEN3_30B_A3B, "int4"),
    "30b-fp8-block": Row("Qwen3-30B-A3B, FP8 in blocks", QWEN3_30B_A3B, "fp8_block"),
    "gpt-oss-20b": Row("gpt-oss-20b, MXFP4 experts", GPT_OSS_20B),
    "8b-int4": Row("Llama-3.1-8B, int4", LLAMA_8B, "int4"),
    "8b-int4-eagle": Row("Llama-3.1-8B, int4, EAGLE, 4 drafts", LLAMA_8B, "int4", "eagle"),
    "8b-fp8": Row("Llama-3.1-8B, FP8 by channel", LLAMA_8B, "fp8"),
    "8b-fp8-block": Row("Llama-3.1-8B, FP8 in blocks", LLAMA_8B, "fp8_block"),
    "8b-nvfp4": Row("Llama-3.1-8B, NVFP4", LLAMA_8B, "nvfp4"),
    "8b": Row("Llama-3.1-8B, bf16", LLAMA_8B),
}
_WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_heads": 2, "num_kv_heads": 1, "head_dim": 64}
_SMALL = dataclasses.replace(TINY, num_layers=2, windows=(), **_WIDE)  # heads that vLLM has kernels for on a CPU
SMOKE = {
    "small": Row("a small model, bf16", _SMALL, prompt=32, new=32),
    "small-eagle": Row("a small model, bf16, EAGLE, 4 drafts", _SMALL, method="eagle", prompt=32, new=32),
}
