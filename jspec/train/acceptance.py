"""The acceptance length of a draft head during training, measured with jspec's engine.

A lower loss matters only as far as the target accepts more drafts. So each evaluation generates text with the weights of
that step, and counts the tokens per verify pass.
"""

from typing import Any

import jax
import numpy as np

from jspec.config import EngineConfig, Speculation
from jspec.config.heads import HeadConfig
from jspec.drafting.methods import drafter_for
from jspec.llm import LLM
from jspec.models import build_head
from jspec.outputs import Stats, total_stats
from jspec.sampling.params import SamplingParams
from jspec.train.data_parallel import replicate_beside
from jspec.train.loop import Params

TEMPERATURES = (0.0, 1.0)
MAX_DRAFT_TOKENS = 4
PROMPT_TOKENS, NEW_TOKENS = 32, 64
MAX_BATCH = 16


class ServedAcceptance:
    """Measures the acceptance of a draft head on prompts, at temperatures 0 and 1.

    The engine is compiled at the first call. Later calls only replace the head's weights.

    Args:
      target: the target's module, whose parameters have ``dtype``; may be sharded.
      config: the draft head's config.
      held_out: token ids ``[N]`` on the host.
      prompts: token ids of prompts; or how many excerpts of ``held_out`` are the prompts, at evenly spaced positions.
      depths: number of drafts that the head is trained to make. K, the number of drafts per round, is the smaller of
        this and ``MAX_DRAFT_TOKENS``. For a draft head whose checkpoint has no number of drafts, K is always
        ``MAX_DRAFT_TOKENS``: an EAGLE head is trained to make a single draft, but when it serves it reads its own hidden
        states as features and drafts any number.
      dtype: ``bfloat16`` or ``float32``.

    Attributes:
      num_draft_tokens: K.
    """

    def __init__(self, target: Any, config: HeadConfig, held_out: np.ndarray, prompts: Any, depths: int, dtype: str):
        max_position = target.config.max_position
        bounded = config.trained_drafts is not None or config.max_drafts is not None
        self.num_draft_tokens = min(depths, MAX_DRAFT_TOKENS) if bounded else MAX_DRAFT_TOKENS
        self._config, self._dtype, self._target = config, dtype, target
        size = min(PROMPT_TOKENS, max_position // 2, len(held_out))
        if isinstance(prompts, int):
            starts = np.linspace(0, len(held_out) - size, prompts, dtype=np.int64)
            prompts = [held_out[start : start + size].tolist() for start in starts]
        self._prompts: list[list[int]] = prompts
        size = max(map(len, prompts))
        self._max_len = min(size + NEW_TOKENS + self.num_draft_tokens, max_position)
        self._llm: LLM | None = None

    def __call__(self, params: Params) -> dict[float, Stats]:
        """Serve the head with these weights, and return the statistics over all prompts for each temperature.

        Args:
          params: all parameters of the head under dotted names, the ones that are not trained included.
        """
        head = replicate_beside(self._target, build_head(self._config, params, self._dtype).prepare())
        if self._llm is None:
            self._llm = self._make_llm(head)
        else:
            self._llm.engine.replace_draft(head)
        return {temperature: self._measure(self._llm, temperature) for temperature in TEMPERATURES}

    def _make_llm(self, head) -> LLM:
        speculation = Speculation(num_draft_tokens=self.num_draft_tokens)
        make_drafter = drafter_for(self._config, self._target.config, speculation)
        engine = EngineConfig(
            max_batch=min(len(self._prompts), MAX_BATCH),
            max_len=self._max_len,
            dtype=self._dtype,
            page_size=32,
        ).for_target(self._target.config)
        return LLM(self._target, head, make_drafter, self._config.method, None, speculation, engine)

    def _measure(self, llm: LLM, temperature: float) -> Stats:
        params = SamplingParams(temperature=temperature, max_tokens=NEW_TOKENS, ignore_eos=True)
        keys = list(np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), len(self._prompts)))))
        results = llm.completions(self._prompts, [params] * len(self._prompts), keys)
        return total_stats(result.stats for *_, result in results)
