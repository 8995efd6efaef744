"""Lossless speculative decoding for JAX."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jspec.api import generate as generate
    from jspec.api import load as load
    from jspec.api import stream as stream
    from jspec.checkpoints.in_memory import InMemory as InMemory
    from jspec.config import EngineConfig as EngineConfig
    from jspec.config import Speculation as Speculation
    from jspec.config import TreeShape as TreeShape
    from jspec.engine.adaptive.cost_table import CostTable as CostTable
    from jspec.engine.engine import QueueFull as QueueFull
    from jspec.engine.metrics import Metrics as Metrics
    from jspec.llm import LLM as LLM
    from jspec.outputs import Delta as Delta
    from jspec.outputs import Result as Result
    from jspec.outputs import Stats as Stats
    from jspec.sampling.params import SamplingParams as SamplingParams
    from jspec.sampling.structured import StructuredOutputsParams as StructuredOutputsParams
    from jspec.sampling.thinking import ThinkingBudget as ThinkingBudget
    from jspec.serving.async_engine import AsyncEngine as AsyncEngine

__version__ = "0.1.0"

# Public name -> the module that defines it. A name is imported when it is first used (PEP 562), so that ``import jspec``
# loads neither JAX nor anything that reads checkpoints.
_PUBLIC = {
    "AsyncEngine": "jspec.serving.async_engine",
    "CostTable": "jspec.engine.adaptive.cost_table",
    "Delta": "jspec.outputs",
    "EngineConfig": "jspec.config",
    "InMemory": "jspec.checkpoints.in_memory",
    "LLM": "jspec.llm",
    "Metrics": "jspec.engine.metrics",
    "QueueFull": "jspec.engine.engine",
    "Result": "jspec.outputs",
    "SamplingParams": "jspec.sampling.params",
    "Speculation": "jspec.config",
    "Stats": "jspec.outputs",
    "StructuredOutputsParams": "jspec.sampling.structured",
    "ThinkingBudget": "jspec.sampling.thinking",
    "TreeShape": "jspec.config",
    "generate": "jspec.api",
    "load": "jspec.api",
    "stream": "jspec.api",
}

__all__ = [*_PUBLIC, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'jspec' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
