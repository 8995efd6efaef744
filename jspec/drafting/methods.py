"""Which drafter goes with what a user loaded."""

from collections.abc import Callable

from jspec.config import ModelConfig, Speculation
from jspec.drafting.base import Drafter
from jspec.drafting.draft_model import DraftModel
from jspec.drafting.eagle import Eagle
from jspec.drafting.medusa import MedusaHeads
from jspec.drafting.mlp import MLP
from jspec.drafting.ngram import NGram
from jspec.drafting.parallel import ParallelHead, ParallelModel
from jspec.drafting.plain import NoDrafts
from jspec.heads import Eagle3Config, EagleConfig, HeadConfig, MLPConfig, PardConfig, resolved_aux_layers

NGRAM = "ngram"
METHODS = ("draft_model", NGRAM, "eagle", "eagle3", "parallel", "mlp", "medusa")


def method_of(draft: ModelConfig | HeadConfig | str | None) -> str | None:
    """One of ``METHODS``, or None for plain decoding."""
    if draft is None or isinstance(draft, str):
        return draft
    return "draft_model" if isinstance(draft, ModelConfig) else draft.method


def drafter_for(
    draft: ModelConfig | HeadConfig | str | None, target: ModelConfig, speculation: Speculation
) -> Callable[..., Drafter]:
    """What builds the drafter around the modules of target and draft, inside a trace: ``(of, by, K=None)``.

    Args:
      draft: what drafts: a language model, a head that fits the target, ``ngram``, or None.
      target: what it drafts for.
      speculation: the largest K, which a drafter has unless it is built with a smaller one, and how tokens are drawn.
    """

    def make(of, by, num_draft_tokens: int | None = None) -> Drafter:
        how = speculation if num_draft_tokens is None else speculation.fixed(num_draft_tokens)
        if draft is None:
            return NoDrafts()
        if draft == NGRAM:
            return NGram(how.most_draft_tokens, how.ngram_min, how.ngram_max)
        if isinstance(draft, ModelConfig):
            return DraftModel(by, target.vocab_size, how)
        if isinstance(draft, PardConfig):
            return ParallelModel(by, target.vocab_size, how, draft.mask_token_id)
        if isinstance(draft, EagleConfig | Eagle3Config):
            kind = ParallelHead if draft.method == "parallel" else Eagle
            return kind(by, of, resolved_aux_layers(target, draft), how)
        return MLP(by, how) if isinstance(draft, MLPConfig) else MedusaHeads(by, of, how)

    return make
