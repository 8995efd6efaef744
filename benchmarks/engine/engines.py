"""Engines over random weights, made one at a time: the pools of two would not fit beside each other."""

import dataclasses
import gc
from collections.abc import Sequence
from typing import Any, Literal

import jax

from benchmarks.rounds.bench import Bench
from benchmarks.rounds.programs import PAGE
from benchmarks.rounds.synthetic import rule_of
from jspec.config import EngineConfig, Speculation
from jspec.drafting.methods import drafter_for
from jspec.engine.decoding import Decoding
from jspec.engine.engine import Engine
from jspec.models.one_order import unpinned
from jspec.sampling.verify import RULES
from jspec.text.detokenizer import Tokenizer

COMPILED = "/jax/core/compile/backend_compile_duration"  # also where the result comes from the compilation cache


@dataclasses.dataclass(frozen=True)
class Setting:
    """What an engine is made for.

    Attributes:
      rows: B, how many requests it decodes together.
      max_len: S, the longest prompt plus completion, in tokens.
      method: how drafts are made, as ``shapes.head_for`` names it; None for plain decoding.
      K: drafts per round, or ``auto``, which chooses among numbers up to ``most``.
      most: the largest K of ``auto``.
      acceptance: synthetic acceptance of every draft.
      draft_sampling: how drafts are drawn.
      num_pages: of the pool; None gives every row room for ``max_len`` tokens.
      page_size: P.
      reproducible: whether the numbers of a request depend on no other.
      prefill_tokens: the most tokens of a prefill pass; None is what the engine takes by itself.
    """

    rows: int
    max_len: int
    method: str | None = None
    K: int | Literal["auto"] = 4
    most: int = 4
    acceptance: float = 0.7
    draft_sampling: str = "auto"
    num_pages: int | None = None
    page_size: int = PAGE
    reproducible: bool = False
    prefill_tokens: int | None = None

    def __str__(self) -> str:
        drafts = "plain" if self.method is None else f"{self.method}, K = {self.K}"
        return f"{drafts}, {self.rows} rows{', reproducible' if self.reproducible else ''}"

    @property
    def speculation(self) -> Speculation:
        if self.method is None:
            return Speculation()
        most = self.most if self.K == "auto" else None
        return Speculation(
            self.K,
            draft_sampling=self.draft_sampling,
            synthetic_acceptance=self.acceptance,
            max_draft_tokens=most,
        )

    def engine_config(self, dtype: str) -> EngineConfig:
        return EngineConfig(
            max_batch=self.rows,
            max_len=self.max_len,
            dtype=dtype,
            page_size=self.page_size,
            num_pages=self.num_pages,
            reproducible=self.reproducible,
            prefill_tokens=self.prefill_tokens,
        )


def make_engine(
    bench: Bench, setting: Setting, tokenizer: Tokenizer | None = None, eos_token_ids: Sequence[int] | None = None
) -> Engine:
    """An engine that has not compiled anything yet."""
    speculation = setting.speculation
    config, module = bench.draft(setting.method)
    target: Any = bench.target
    return Engine(
        target,
        module,
        Decoding(
            drafter_for(config, bench.pair.target, speculation),
            _rule(speculation),
            draft_lengths=speculation.draft_lengths if speculation.auto else None,
        ),
        unpinned(setting.engine_config(bench.dtype).for_target(bench.pair.target), target, module),
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        method=setting.method,
    )


class Engines:
    """Engines by their settings, ready to serve. The next one replaces the one before.

    It is a context manager, inside of which compilations are counted.

    Args:
      bench: the weights, which all of them share.

    Attributes:
      num_late_compilations: programs that were compiled while no engine was being made, those of JAX itself included.
    """

    def __init__(self, bench: Bench):
        self.bench, self.num_late_compilations = bench, 0
        self._setting: Setting | None = None
        self._engine: Any = None
        self._making = False

    def __enter__(self) -> "Engines":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self._listen)
        self.drop()

    def get(self, setting: Setting) -> Engine:
        """An idle engine that has been warmed up. The one of another setting, if there is one, loses its memory."""
        if setting != self._setting:
            self.drop()
            self._making = True
            try:
                self._engine = make_engine(self.bench, setting)
                self._engine.warmup()
            finally:
                self._making = False
            self._setting = setting
        return self._engine

    def _listen(self, event: str, duration_secs: float, **_):
        if event == COMPILED and not self._making:
            self.num_late_compilations += 1

    def drop(self):
        """Give the memory of the last engine back."""
        self._setting = self._engine = None
        gc.collect()


def _rule(speculation: Speculation) -> str:
    """The name of the verification rule. An engine knows rules by their names, so that of synthetic acceptance gets
    one."""
    if speculation.synthetic_acceptance is None:
        return speculation.verify
    name = f"{speculation.verify}, synthetic {speculation.most_draft_tokens} x {speculation.synthetic_acceptance}"
    RULES[name] = rule_of(speculation)
    return name
