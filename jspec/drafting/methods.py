"""Which drafter goes with what a user loaded."""

from collections.abc import Callable
from typing import Any

from jspec.config import ModelConfig, Speculation
from jspec.drafting.base import Drafter
from jspec.drafting.draft_model import DraftModel
from jspec.drafting.eagle import Eagle
from jspec.drafting.medusa import MedusaHeads
from jspec.drafting.mlp import MLP
from jspec.drafting.ngram import NGram
from jspec.drafting.parallel import ParallelHead, ParallelModel
from jspec.drafting.plain import NoDrafts
from jspec.heads import Eagle3Config, EagleConfig, HeadConfig, MLPConfig, PardConfig, resolved_taps

NGRAM = "ngram"
METHODS = ("draft_model", NGRAM, "eagle", "eagle3", "parallel", "mlp", "medusa")


def method_of(draft: ModelConfig | HeadConfig | str | None) -> str | None:
    """One of ``METHODS``, or None for plain decoding."""
    if draft is None or isinstance(draft, str):
        return draft
    return "draft_model" if isinstance(draft, ModelConfig) else draft.method


def drafter_for(
    draft: ModelConfig | HeadConfig | str | None, target: ModelConfig, speculation: Speculation
) -> Callable[[Any, Any], Drafter]:
    """What builds the drafter around the modules of target and draft, inside a trace.

    Args:
      draft: what drafts: a language model, a head that fits the target, ``ngram``, or None.
      target: what it drafts for.
      speculation: K and how tokens are drawn.
    """

    def make(of, by) -> Drafter:
        if draft is None:
            return NoDrafts()
        if draft == NGRAM:
            return NGram(speculation.num_draft_tokens, speculation.ngram_min, speculation.ngram_max)
        if isinstance(draft, ModelConfig):
            return DraftModel(by, target.vocab_size, speculation)
        if isinstance(draft, PardConfig):
            return ParallelModel(by, target.vocab_size, speculation, draft.mask_token_id)
        if isinstance(draft, EagleConfig | Eagle3Config):
            kind = ParallelHead if draft.method == "parallel" else Eagle
            return kind(by, of, resolved_taps(target, draft), speculation)
        return MLP(by, speculation) if isinstance(draft, MLPConfig) else MedusaHeads(by, of, speculation)

    return make
