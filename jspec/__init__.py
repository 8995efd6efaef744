"""Lossless speculative decoding for JAX."""

from jspec.api import generate as generate
from jspec.api import load as load
from jspec.config import Speculation as Speculation
from jspec.costs import CostTable as CostTable
from jspec.llm import LLM as LLM
from jspec.results import Result as Result
from jspec.results import Stats as Stats
from jspec.sampling.params import SamplingParams as SamplingParams

__version__ = "0.1.0"
