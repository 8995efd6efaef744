"""Builds the drafter of a method in ``jspec.registry``."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jspec.config import ModelConfig, Speculation, TreeShape
from jspec.config.heads import DraftConfig
from jspec.drafting.base import Drafter, Setup
from jspec.drafting.lookup import with_lookup
from jspec.drafting.plain import NoDrafts
from jspec.drafting.tree import BlockTree, EagleTree
from jspec.models.protocols import Target
from jspec.registry import entry_of, resolve


def method_of(draft: DraftConfig | str | None) -> str | None:
    """Name of the drafting method. None for plain decoding, where ``draft`` is None."""
    return None if draft is None else entry_of(draft).name


def drafter_for(
    draft: DraftConfig | str | None, target: ModelConfig, speculation: Speculation
) -> Callable[..., Drafter]:
    """A function ``(target module, draft module, drafts=None)`` that builds the drafter, inside a trace.

    Args:
      draft: the config of a draft model or of a draft head that fits the target, the name of a method that has no
        checkpoint, or None for plain decoding.
      target: config of the target.
      speculation: how drafts are drawn, and the largest K. A drafter has this K unless it is built with a smaller
        number of ``drafts``, or with the shape of trees as ``drafts``.
    """
    drafter: type[Drafter] = NoDrafts if draft is None else resolve(entry_of(draft).drafter)
    return DrafterBuilder(drafter, None if isinstance(draft, str) else draft, target, speculation)


@dataclasses.dataclass(frozen=True)
class DrafterBuilder:
    """The function that ``drafter_for`` returns; its ``repr`` identifies the drafter but for code and weights.

    Attributes:
      drafter: the class of the drafter.
      draft: the config of the draft model or draft head, or None.
      target, speculation: as for ``drafter_for``.
    """

    drafter: type[Drafter]
    draft: DraftConfig | None
    target: ModelConfig
    speculation: Speculation

    def __call__(self, target_module: Target, draft_module: Any, drafts: int | TreeShape | None = None) -> Drafter:
        settings = self.speculation if drafts is None else self.speculation.fixed(drafts)
        kinds = {kind.kind: kind for kind in (EagleTree, BlockTree)} if isinstance(settings.tree, TreeShape) else {}
        drafter: Any = kinds.get(self.drafter, self.drafter).build(
            Setup(self.draft, self.target, target_module, draft_module, settings)
        )
        return with_lookup(drafter, settings)
