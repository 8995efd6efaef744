"""Which drafter goes with what a user loaded, as ``jspec.registry`` says."""

from collections.abc import Callable
from typing import Any

from jspec.config import ModelConfig, Speculation
from jspec.drafting.base import Drafter, Setup
from jspec.drafting.plain import NoDrafts
from jspec.heads import DraftConfig
from jspec.models.contract import Target
from jspec.registry import entry_of, resolve


def method_of(draft: DraftConfig | str | None) -> str | None:
    """Name of the drafting method, or None for plain decoding."""
    return None if draft is None else entry_of(draft).name


def drafter_for(
    draft: DraftConfig | str | None, target: ModelConfig, speculation: Speculation
) -> Callable[..., Drafter]:
    """What builds the drafter around the modules of target and draft, inside a trace: ``(target, draft, K=None)``.

    Args:
      draft: what drafts: the config of a language model or of a head that fits the target, the name of a method that has
        no checkpoint, or None for plain decoding.
      target: what it drafts for.
      speculation: the largest K, which a drafter has unless it is built with a smaller one, and how tokens are drawn.
    """
    kind: type[Drafter] = NoDrafts if draft is None else resolve(entry_of(draft).drafter)
    config = None if isinstance(draft, str) else draft

    def make(target_module: Target, draft_module: Any, num_draft_tokens: int | None = None) -> Drafter:
        how = speculation if num_draft_tokens is None else speculation.fixed(num_draft_tokens)
        return kind.build(Setup(config, target, target_module, draft_module, how))

    return make
