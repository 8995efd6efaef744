"""Finds the drafter of a method in ``jspec.registry`` and builds it."""

from collections.abc import Callable
from typing import Any

from jspec.config import ModelConfig, Speculation
from jspec.drafting.base import Drafter, Setup
from jspec.drafting.plain import NoDrafts
from jspec.heads import DraftConfig
from jspec.models.contract import Target
from jspec.registry import entry_of, resolve


def method_of(draft: DraftConfig | str | None) -> str | None:
    """Name of the drafting method. None for plain decoding, where ``draft`` is None."""
    return None if draft is None else entry_of(draft).name


def drafter_for(
    draft: DraftConfig | str | None, target: ModelConfig, speculation: Speculation
) -> Callable[..., Drafter]:
    """A function ``(target module, draft module, num_draft_tokens=None)`` that builds the drafter, inside a trace.

    Args:
      draft: the config of a draft model or of a draft head that fits the target, the name of a method that has no
        checkpoint, or None for plain decoding.
      target: config of the target.
      speculation: how drafts are drawn, and the largest K. A drafter has this K unless it is built with a smaller
        ``num_draft_tokens``.
    """
    drafter_class: type[Drafter] = NoDrafts if draft is None else resolve(entry_of(draft).drafter)
    config = None if isinstance(draft, str) else draft

    def make(target_module: Target, draft_module: Any, num_draft_tokens: int | None = None) -> Drafter:
        settings = speculation if num_draft_tokens is None else speculation.fixed(num_draft_tokens)
        return drafter_class.build(Setup(config, target, target_module, draft_module, settings))

    return make
