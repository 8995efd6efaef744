"""Checks of a target and its draft that run neither, and the coverage of a reduced vocabulary."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.layouts.options import HeadOptions
from jspec.config import ModelConfig
from jspec.config.heads import BlockConfig, DraftConfig, Eagle3Config
from jspec.doctor.trials import Text
from jspec.doctor.variants import widest_window
from jspec.text.detokenizer import Tokenizer

COVERED = 0.9  # the share of the target's tokens that a reduced vocabulary should have


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check. ``status`` is ``ok``, ``note`` (worth knowing), ``warning`` or ``wrong``."""

    name: str
    status: str
    detail: str


def own_tokenizer(draft: Checkpoint) -> Tokenizer | None:
    """The tokenizer in a draft's folder; None if there is none, or if it needs code from the folder, which is never run."""
    try:
        return draft.tokenizer
    except ValueError:
        return None


def compared_tokenizers(ours: Tokenizer | None, theirs: Tokenizer | None) -> Iterator[Check]:
    """Whether the target's tokenizer and the draft's agree on ids, special tokens and chat template."""
    if ours is None or theirs is None:
        whose = "target" if ours is None else "draft"
        yield Check("tokenizer", "note", f"the {whose} has no tokenizer to compare")
        return
    our_ids, their_ids = ours.get_vocab(), theirs.get_vocab()  # each call makes a dict of all tokens
    different = [token for token, index in our_ids.items() if their_ids.get(token, index) != index]
    if different:
        token = different[0]
        yield Check(
            "tokenizer",
            "wrong",
            f"{len(different)} tokens have other ids in the draft's tokenizer, for instance {token!r}: "
            f"{our_ids[token]} for the target and {their_ids[token]} for the draft",
        )
    else:
        yield Check("tokenizer", "ok", "every token of the target that the draft knows has the same id")
    names = ("bos_token", "eos_token", "pad_token")
    special = {name: (getattr(ours, name, None), getattr(theirs, name, None)) for name in names}
    for name, (our, their) in special.items():
        if our != their:
            yield Check("special tokens", "warning", f"{name} is {our!r} for the target and {their!r} for the draft")
    if getattr(ours, "chat_template", None) != getattr(theirs, "chat_template", None):
        yield Check("chat template", "warning", "the draft's folder has another one; the target's is used")


def target_weights(config: ModelConfig, target: Checkpoint, draft: Checkpoint, dtype: str) -> Check:
    """Whether the target computes with the weights and the dtype that the draft was probably trained for."""
    stored, drafts = map(_stored_dtype, (target, draft))
    detail = f"{stored} on disk, computed in {dtype}; the draft is stored in {drafts}"
    if config.quantization is not None:
        detail += f"; quantised to {config.formats}, and a draft is mostly trained for the original weights"
    return Check("weights", "ok" if config.quantization is None and dtype in stored else "note", detail)


def _stored_dtype(checkpoint: Checkpoint) -> str:
    config = checkpoint.folder.json("config.json")
    return str(config.get("torch_dtype") or config.get("dtype") or "an unnamed dtype")


def position_limit(target: ModelConfig, given: DraftConfig, known: DraftConfig) -> Check:
    """The longest text of the draft: ``given`` is the config in its checkpoint, ``known`` the one in use."""
    stated, used = given.decoder, known.decoder
    if stated is None or used is None:
        return Check("positions", "ok", "the draft has no limit of its own")
    if used.max_position > stated.max_position:
        detail = f"the checkpoint states {stated.max_position}; drafts go on up to {used.max_position}"
        return Check("positions", "note", f"{detail}, though the draft may not have learnt texts that long")
    short = used.max_position < target.max_position
    detail = f"{used.max_position} of the draft, {target.max_position} of the target"
    return Check("positions", "warning" if short else "ok", detail + "; longer texts draft nothing" * short)


def head_inputs(target: ModelConfig, head: DraftConfig, options: HeadOptions) -> Iterator[Check]:
    """The hidden states of the target that an EAGLE-3 head reads, and the output that it feeds back."""
    if not isinstance(head, Eagle3Config):
        return
    aux_layers = head.resolved_aux_layers(target)
    why = f" ({options.aux_convention})" if options.aux_convention else " (the default)" * (head.aux_layers is None)
    what = (
        f"after layers {', '.join(map(str, aux_layers))} of {target.num_layers}"
        if aux_layers
        else "the final hidden state"
    )
    yield Check("aux_layers", "ok", f"{what}{why}")
    fed = "the normed output" if head.norm_output else "the output before the final norm"
    yield Check("fed back", "ok", fed + f" ({options.norm_output})" * (options.norm_output is not None))


def windows(head: DraftConfig, texts: Sequence[Text]) -> Iterator[Check]:
    """From where the windows of a block drafter are counted, and whether the texts are long enough to tell."""
    if (widest := widest_window(head)) and isinstance(head, BlockConfig):
        longest = max(len(text.tokens) for text in texts)
        causal = {flag for flag, W in zip(head.causal, head.layers.windows, strict=True) if W}
        anchored = {head.windows_from_anchor if flag else not head.windows_by_slot for flag in causal}
        where = " or ".join("the anchor" if flag else "each slot" for flag in sorted(anchored))
        detail = f"of {widest} tokens, counted from {where}"
        short = f"; no text has more than {longest} tokens, so that it was not measured: give longer prompts"
        yield Check("windows", *(("ok", detail) if longest > widest else ("note", detail + short)))


def draft_vocabulary(head: DraftConfig, params: Mapping[str, Any], texts: Sequence[Text]) -> Iterator[Check]:
    """The share of the target's tokens that are in the reduced vocabulary."""
    if not head.reduced:
        return
    has_draft_id = np.asarray(params["draft_ids"]) >= 0
    written = np.concatenate([np.array(text.tokens[text.prompt_length :], np.int64) for text in texts])
    share = float(has_draft_id[written].mean())
    sizes = head.dimensions
    detail = f"{sizes['Vd']} of {sizes['V']} tokens, {share:.0%} of those that the target wrote here"
    yield Check("draft vocabulary", "ok" if share >= COVERED else "warning", detail)
