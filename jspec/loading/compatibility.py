"""Checks a target, a draft and the user's settings against each other, and lowers K and positions to what the draft has."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Literal

from jspec._validation import require
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.config import MAX_POSITIONS, ModelConfig, Shards, Speculation, TreeShape
from jspec.config.heads import (
    AssistantConfig,
    BlockConfig,
    DraftConfig,
    Eagle3Config,
    EagleConfig,
    HeadConfig,
    MTPConfig,
    PardConfig,
)
from jspec.config.speculation import AUTO_TREES
from jspec.models.sharding import mesh_of
from jspec.registry import LOOKED_UP, NGRAM, entry_of, particular_options
from jspec.text.detokenizer import Tokenizer

TREES = ("eagle", "eagle3", "dflash", "dspark")  # the methods that propose trees


def check_options(draft: DraftConfig | str | None, speculation: Speculation):
    """Refuse an option of ``speculation`` that the drafting method has no use for.

    Args:
      draft: the config of a draft model or draft head, the name of a method that has no checkpoint, or None for plain
        decoding.
      speculation: how to draft.
    """
    if draft is None:
        beside = f"draft= beside it, a draft head or a draft model; draft={NGRAM!r} looks drafts up alone"
        require(not speculation.lookup, "lookup", speculation.lookup, beside)
        budget, expected = speculation.verify_budget, "None without drafts, or draft= and num_draft_tokens beside it"
        require(budget is None, "verify_budget", budget, expected)
        return
    method, default = entry_of(draft), Speculation()
    if method.config is not None and method.argmax_below is None:
        expected = f"'argmax' or 'auto' with the drafting method {method.name!r}, {method.help}, and samples nothing"
        require(speculation.draft_sampling != "sample", "draft_sampling", "sample", expected)
    used = {*method.options, *(LOOKED_UP if speculation.lookup else ())}
    for option in sorted(particular_options() - used):
        value = getattr(speculation, option)
        if value != getattr(default, option):
            raise ValueError(
                f"{option}={value!r} has no place with the drafting method {method.name!r}, {method.help}; leave it out"
            )


def check_tree(
    target: ModelConfig,
    draft: DraftConfig | str | None,
    asked: TreeShape | Literal["auto"] | None,
    shards: Sequence[Shards | None],
):
    """Refuse trees of drafts for what has none yet, with the reason; under ``auto``, the deepest ones."""
    if asked is None:
        return
    tree = asked if isinstance(asked, TreeShape) else AUTO_TREES[0]
    method = None if draft is None else entry_of(draft).name
    most = tree.depth if draft is None or isinstance(draft, str) or draft.max_drafts is None else draft.max_drafts
    chooses = isinstance(draft, BlockConfig) and (draft.domino or draft.lilicorr or draft.is_dflash2)
    windows = [window for window in target.windows if window is not None]
    for ok, why in (
        (method in TREES, f"draft is {method!r}, expected one of {', '.join(TREES)}"),
        (not chooses, "draft is a DFlash2, Domino or LiLiCorr head, of which no trees were tried"),
        (most >= tree.depth, f"draft has weights for {most} drafts, fewer than depth={tree.depth}"),
        (target.latent is None, "the target caches latents, whose attention has no trees"),
        (target.delta_nets is None, "the target has gated delta nets, whose states would have to branch"),
        (shards[0] is None, "the target is on several GPUs, whose rounds have no trees"),
        (min(windows, default=tree.depth + 1) > tree.depth, f"a window of the target is not longer than {tree.depth}"),
    ):
        if not ok:
            raise ValueError(f"tree={asked!r}: {why}; leave tree out")


def check_compatible(
    target: ModelConfig, config: ModelConfig | HeadConfig, tokenizer: Tokenizer | None, draft: Checkpoint
):
    """Refuse a draft head of another target, a draft model with other token ids, or a PARD model with recurrent states.

    Args:
      target, config: the configs of the target and of the draft.
      tokenizer: the target's, None if its checkpoint has none.
      draft: the checkpoint that may hold the draft's tokenizer. That of a draft head is not read, because a head needs none.
    """
    config.require_fit(target)
    check_states(config)
    if config.language_model is not None:
        check_tokenizers(target, config.language_model, tokenizer, draft.tokenizer)


def require_shards(shards: Sequence[Shards | None], target: ModelConfig, draft: DraftConfig | None):
    """Raise a ValueError unless target and draft can be split into ``shards``, and there are so many devices."""
    if isinstance(draft, AssistantConfig) and shards[0] is not None and draft.layers.num_heads % shards[0].count:
        raise ValueError(
            f"tensor_parallel={shards[0].count}: expected a divisor of {draft.layers.num_heads}, how many attention heads "
            "an assistant has: each device attends with some of them; or draft with draft='ngram'"
        )
    for shard, config in zip(shards, (target, None if draft is None else draft.language_model), strict=True):
        if shard is not None:
            mesh_of(shard.count, shard.axis)
        if shard is not None and config is not None:
            shard.local(config)


def check_states(draft: ModelConfig | HeadConfig):
    """Refuse a PARD model with recurrent states.

    It reads mask slots behind the text, in one pass, which such states would have to forget. A draft model that drafts one
    token after another forgets what is rejected (``jspec.drafting.recurrent``)."""
    if isinstance(draft, PardConfig) and draft.model.delta_nets is not None:
        raise ValueError(
            f"a {draft.model.architecture} cannot draft by mask tokens, because its gated delta nets would keep them; "
            "expected a PARD model whose layers all have attention, or the same model without pard_token as a draft model"
        )


def with_available_drafts(speculation: Speculation, draft: ModelConfig | HeadConfig) -> Speculation:
    """``speculation`` with no more drafts than the draft has weights for.

    It warns if that is fewer than the user asked for, or if the draft head was trained to draft fewer.
    """
    if isinstance(speculation.tree, TreeShape):  # ``check_tree`` refuses one that is too deep
        return speculation
    auto = speculation.num_draft_tokens == "auto"
    K, field = speculation.longest_chain, "max_draft_tokens" if auto else "num_draft_tokens"
    asked = not auto or speculation.max_draft_tokens is not None
    if draft.max_drafts is not None and draft.max_drafts < K:
        if asked:
            warnings.warn(
                f"{field}={K}: the {draft.method} checkpoint has weights for {draft.max_drafts}, so a round drafts "
                f"{draft.max_drafts}",
                stacklevel=4,
            )
        return dataclasses.replace(speculation, **{field: draft.max_drafts})
    if asked and draft.trained_drafts is not None and draft.trained_drafts < K:
        warnings.warn(
            f"{field}={K}: the {draft.method} head was trained to draft {draft.trained_drafts}; later drafts "
            "may be accepted rarely",
            stacklevel=4,
        )
    return speculation


def with_positions(target: ModelConfig, draft: ModelConfig | HeadConfig, max_len: int) -> ModelConfig | HeadConfig:
    """``draft`` as it serves texts of up to ``max_len`` tokens, with as many positions as it can draft at.

    It warns if they are fewer than ``max_len``. A ``longrope`` takes the factors for that length: see ``Rope.for_length``.

    An EAGLE head or a block drafter drafts at every position of its target, whatever its config.json states. Many EAGLE
    heads were trained on texts of 2048 tokens and state that number, but their authors and vLLM draft past it, because the
    rotary embedding is a formula without an end. There are exceptions: ``yarn`` ends at the length that it was stretched to,
    and ``dynamic`` and ``longrope`` end at ``max_position``. A language model that drafts keeps the limit that it states: it
    has not learnt to predict anything past it, and each of its passes costs more than one of a draft head.
    """
    if isinstance(draft, ModelConfig):
        draft = draft.for_length(max_len)
    elif isinstance(draft, PardConfig):
        draft = dataclasses.replace(draft, model=draft.model.for_length(max_len))
    if not isinstance(draft, EagleConfig | Eagle3Config | MTPConfig | BlockConfig):
        decoder = draft.decoder
        limit = max_len if decoder is None else decoder.max_position
    else:
        layers = draft.layers.for_length(max_len)
        limit = max(layers.max_position, min(_rope_limit(layers), target.max_position))
        draft = dataclasses.replace(draft, layers=dataclasses.replace(layers, max_position=limit))
    if limit < max_len:
        warnings.warn(
            f"the {draft.method} checkpoint has {limit} positions, and max_len={max_len}: nothing is drafted after "
            "longer texts",
            stacklevel=4,
        )
    return draft


def _rope_limit(layers: ModelConfig) -> int:
    """How many positions the rotary embedding of these layers has a meaning for."""
    rope = layers.rope
    if rope is not None and rope.kind == "yarn":
        return int(rope.factor * rope.original_max_position)
    ends = rope is None or rope.kind in ("dynamic", "longrope")
    return layers.max_position if ends else MAX_POSITIONS


def check_tokenizers(
    target: ModelConfig, draft: ModelConfig, tokenizer: Tokenizer | None, draft_tokenizer: Tokenizer | None
):
    """Refuse a draft model whose token ids mean other tokens than the target's.

    Sizes may differ where a vocabulary is padded. Without both tokenizers nothing can be compared but the sizes, and
    these have to be equal then.

    Args:
      target, draft: their configurations.
      tokenizer, draft_tokenizer: their tokenizers, None where a checkpoint has none.
    """
    if tokenizer is None or draft_tokenizer is None:
        if target.vocab_size != draft.vocab_size:
            raise ValueError(
                f"draft has a vocabulary of {draft.vocab_size} and the target of {target.vocab_size}, and without both "
                "tokenizers nothing shows that they agree; expected equal sizes"
            )
        return
    ours, theirs = tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    for token, index in ours.items():
        if theirs.get(token, None if index < len(theirs) else index) != index:
            raise ValueError(
                f"draft's tokenizer differs from the target's: token {token!r} is {index} for the target and "
                f"{theirs.get(token)} for the draft; expected a draft model with the target's tokenizer"
            )
