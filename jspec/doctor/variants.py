"""Alternatives of the settings that a draft head's checkpoint may leave open, each tried on texts of the target."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jspec.checkpoints.layouts.options import HeadOptions
from jspec.config import ModelConfig
from jspec.config.heads import BlockConfig, DraftConfig, Eagle3Config
from jspec.doctor.trials import Text, Trials, TriedConfig
from jspec.outputs import Stats


@dataclasses.dataclass(frozen=True)
class Trial:
    """A draft head with certain settings, and its acceptance on the texts of the target.

    Attributes:
      label: the difference to the given settings, for the printed table.
      setting: the same, for the verdict; None without a difference.
      stats: the statistics of the rounds that write the texts, one after the other.
      rounds: int ``[n]``, how many drafts a round accepts, for a round from each of n places in the texts.
    """

    label: str
    setting: str | None
    stats: Stats
    rounds: np.ndarray


def try_variants(
    model: Any,
    config: DraftConfig,
    params: Mapping[str, Any],
    texts: Sequence[Text],
    K: int,
    dtype: str,
    options: HeadOptions,
) -> tuple[Trial, ...]:
    """Try a draft head with its given settings, then with each alternative; () for drafts of other kinds.

    Args:
      model: the target's module.
      config, params: the draft's config and weights, as they are in its checkpoint.
      texts: texts that the target has completed greedily.
      K: the drafts of a round.
      dtype: ``bfloat16`` or ``float32``.
      options: the user's settings of the draft head.
    """
    if isinstance(config, Eagle3Config):
        every: Sequence[tuple[str, str | None, TriedConfig]] = list(variants(model.config, config, options))
    elif isinstance(config, BlockConfig):
        every = block_layouts = list(layouts(config, max(len(text.tokens) for text in texts)))
        K = min([K, *(head.max_drafts for _, _, head in block_layouts)])
    else:
        return ()
    layers_read = [head.resolved_aux_layers(model.config) for _, _, head in every]
    trials, results = Trials(model, texts, [layer for layers in layers_read for layer in layers]), []
    for (label, setting, head), layers in zip(every, layers_read, strict=True):
        accepted = trials.accepted(head, params, layers, K, dtype)
        results.append(Trial(label, setting, trials.stats(accepted, K), np.concatenate(accepted)))
    return tuple(results)


def variants(
    target: ModelConfig, head: Eagle3Config, options: HeadOptions
) -> Iterator[tuple[str, str | None, Eagle3Config]]:
    """(label, setting, config) of the draft head as given, and of each alternative that its weights allow."""
    aux_layers, flips = head.resolved_aux_layers(target), (False,)
    if head.norm_before_head and head.method == "eagle3":
        flips = (False, True)
    for shift in (0, 1, -1):
        moved = tuple(layer + shift for layer in aux_layers)
        if shift and not (moved and moved[0] >= 0 and moved[-1] <= target.num_layers):
            continue
        for flip in flips:
            variant = dataclasses.replace(head, norm_output=head.norm_output != flip)
            if shift:
                variant = dataclasses.replace(variant, aux_layers=moved)
            changes = [_layer_setting(shift, moved, options)] * bool(shift) + [_norm_setting(variant, options)] * flip
            yield " and ".join(changes) or "as read", " and ".join(changes) or None, variant


def widest_window(head: DraftConfig) -> int:
    """The most tokens that a layer of a block drafter sees before a block; 0 if no layer has a window, and of others."""
    return max((W for W in head.layers.windows if W), default=0) if isinstance(head, BlockConfig) else 0


def layouts(head: BlockConfig, longest: int) -> Iterator[tuple[str, str | None, BlockConfig]]:
    """(label, setting, config) of a block drafter as given, with its drafts made one slot earlier or later, and with windows
    that begin elsewhere.

    Either the anchor's slot makes the first draft, or the slot behind it, and configs of checkpoints may leave this open. A
    block of two slots or more has the weights for both. Where windows begin shows in texts of more tokens than they have;
    ``longest`` says how many the longest text has."""
    yield "as read", None, head
    if head.block_size > 1:
        other = dataclasses.replace(head, anchor_first=not head.anchor_first)
        slot = "anchor's slot" if other.anchor_first else "slot behind the anchor's"
        key = f"sample_from_anchor {str(other.anchor_first).lower()}"
        yield key, f"the first draft in the {slot}, {key}", other
    seen = {flag: W for flag, W in zip(head.causal, head.layers.windows, strict=True) if W is not None and longest > W}
    for anchored, where in ((True, "the anchor"), (False, "each slot")):
        if not anchored and seen.get(False, head.block_size) < head.block_size:
            continue
        flags = {"windows_from_anchor": anchored and True in seen, "windows_by_slot": not anchored and False in seen}
        if seen and (other := dataclasses.replace(head, **flags)) != head:
            key = f"windows_from_anchor {str(anchored).lower()}"
            yield key, f"windows that are counted from {where}, {key}", other


def _layer_setting(shift: int, moved: tuple[int, ...], options: HeadOptions) -> str:
    convention = {("input_of", 1): "output_of", ("output_of", -1): "input_of"}.get((str(options.aux_convention), shift))
    if convention is not None:
        return f"aux_convention={convention!r}"
    return f"aux_layers {', '.join(map(str, moved))}, one {'higher' if shift > 0 else 'lower'}"


def _norm_setting(head: Eagle3Config, options: HeadOptions) -> str:
    other = "recycled" if head.norm_output else "before_head"
    if options.norm_output not in (None, other):
        return f"norm_output={other!r}"
    return f"{'the normed output' if head.norm_output else 'the output before the norm'} fed back"
