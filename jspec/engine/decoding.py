"""How an engine decodes, apart from sizes: the drafter, the rule that verifies, and what may be chosen between calls."""

import dataclasses
from collections.abc import Callable, Sequence

from jspec.config import Speculation, TreeShape
from jspec.drafting.base import Drafter
from jspec.sampling.streams import RoundNoise

Budgets = Callable[[int, int], Sequence[int | None]]
Trees = Callable[[int], Sequence[TreeShape]]


def verify_every_draft(rows: int, K: int) -> tuple[None]:
    """``Budgets`` without a verification budget: the target reads every draft."""
    del rows, K
    return (None,)


def chains_alone(rows: int) -> tuple[()]:
    """``Trees`` without a tree."""
    del rows
    return ()


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How rounds draft and verify.

    Attributes:
      make_drafter: builds the drafter around target and draft model, inside a trace; given a number of drafts as well,
        one of that K, and given a shape of trees, one that proposes them.
      rule: the name of a verification rule.
      noise: makes the noise of a round from the keys and lengths of its rows.
      draft_lengths: every K of chains that the engine may choose between calls, 0 among them, and the drafter's own where
        no tree is as deep; None is the drafter's own K alone.
      budgets: (rows, K) -> verification budgets, in tokens that the target reads in a round; None among them is all. The
        engine chooses where there are several.
      tree: the shape of trees, where the drafter that ``make_drafter`` builds proposes some; else None.
      trees: rows -> shapes of trees: ``tree``, or those among which, and chains of ``draft_lengths``, the engine chooses.
    """

    make_drafter: Callable[..., Drafter]
    rule: str
    noise: Callable[..., RoundNoise] = RoundNoise
    draft_lengths: Sequence[int] | None = None
    budgets: Budgets = verify_every_draft
    tree: TreeShape | None = None
    trees: Trees = chains_alone

    @classmethod
    def of(cls, make_drafter: Callable[..., Drafter], speculation: Speculation, drafts: bool) -> "Decoding":
        """What a ``Speculation`` asks for; ``drafts`` says whether there is a draft model or a method that drafts."""
        return cls(
            make_drafter,
            speculation.verify,
            draft_lengths=speculation.draft_lengths if speculation.auto and drafts else None,
            budgets=speculation.budgets if speculation.verify_budget is not None and drafts else verify_every_draft,
            tree=speculation.tree if isinstance(speculation.tree, TreeShape) else None,
            trees=speculation.trees,
        )
