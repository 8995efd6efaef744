"""The figure that training is for: how long accepted drafts are when the head serves, measured by the engine itself."""

import functools
import operator
from typing import Any

import jax
import numpy as np

from jspec.config import EngineConfig, ModelConfig, Speculation
from jspec.drafting.methods import drafter_for
from jspec.heads import HeadConfig
from jspec.llm import LLM
from jspec.models import build_head
from jspec.results import Stats
from jspec.sampling.params import SamplingParams
from jspec.train.loop import Params

TEMPERATURES = (0.0, 1.0)
MOST_DRAFTS = 4
PROMPT_TOKENS, NEW_TOKENS = 32, 64
ROWS = 16


class ServedAcceptance:
    """Serves a head on held-out prompts; compiled once, for weights of every step.

    Args:
      target: the target's module, of ``dtype``.
      config: the head.
      held_out: token ids ``[N]`` that prompts are taken from, evenly spaced.
      prompts: how many.
      depths: places ahead that the head is trained for; up to ``MOST_DRAFTS`` of them are drafted. A head whose
        checkpoint knows no number of drafts, such as EAGLE's, drafts ``MOST_DRAFTS``.
      dtype: ``bfloat16`` or ``float32``.
    """

    def __init__(self, target: Any, config: HeadConfig, held_out: np.ndarray, prompts: int, depths: int, dtype: str):
        of: ModelConfig = target.config
        bounded = config.trained_drafts is not None or config.max_drafts is not None
        self.num_draft_tokens = min(depths, MOST_DRAFTS) if bounded else MOST_DRAFTS
        self._config, self._dtype, self._target = config, dtype, target
        size = min(PROMPT_TOKENS, of.max_position // 2, len(held_out))
        starts = np.linspace(0, len(held_out) - size, prompts, dtype=np.int64)
        self._prompts = [held_out[start : start + size].tolist() for start in starts]
        self._max_len = min(size + NEW_TOKENS + self.num_draft_tokens, of.max_position)
        self._llm: LLM | None = None

    def __call__(self, params: Params) -> dict[float, Stats]:
        """Temperature -> the steps of all prompts together, for all params of a head (dotted names)."""
        head = build_head(self._config, params, self._dtype).prepare()
        if self._llm is None:
            self._llm = self._serve(head)
        else:
            self._llm.engine.replace_draft(head)
        return {temperature: self._measure(self._llm, temperature) for temperature in TEMPERATURES}

    def _serve(self, head) -> LLM:
        speculation = Speculation(num_draft_tokens=self.num_draft_tokens)
        make_drafter = drafter_for(self._config, self._target.config, speculation)
        engine = EngineConfig(
            max_batch=min(len(self._prompts), ROWS),
            max_len=self._max_len,
            dtype=self._dtype,
            page_size=32,
            prefill_chunk=32,
        )
        return LLM(self._target, head, make_drafter, self._config.method, None, speculation, engine)

    def _measure(self, llm: LLM, temperature: float) -> Stats:
        params = SamplingParams(temperature=temperature, max_tokens=NEW_TOKENS, ignore_eos=True)
        keys = list(np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), len(self._prompts)))))
        results = llm.generate(self._prompts, [params] * len(self._prompts), keys)
        return functools.reduce(operator.add, (result.stats for _, result in results))
