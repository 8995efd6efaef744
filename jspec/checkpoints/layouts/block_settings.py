"""The settings of block drafters in config.json that change what they compute: what is read, and what is refused.

A setting may be in ``dflash_config`` or at the top. Those that are known to change what a block drafter computes, and that
are not supported, are refused, because ignoring them would only show in how many drafts are accepted."""

import dataclasses
from collections.abc import Sequence

from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.layouts.eagle3_settings import Settings
from jspec.config import ModelConfig

DFLASH = "dflash_config"
# Whether the anchor's slot drafts: it is query zero of the block, and the next token is the one behind it. The first name is
# that of the speculators package, and published heads that were trained with DeepSpec have either or both.
ANCHOR_KEYS = ("sample_from_anchor", "query_zero_predicts_next")
PROJECTOR, PROJECTORS = "projector_type", ("dflash", "dflash2", "dspark", "domino", "lilicorr")
CAUSAL_KEYS = ("causal_head", "is_causal", "causal")
WINDOWS = "windows_from_anchor"  # of jspec alone, for heads whose trainer no file names
MASK_EMBEDDING = "mask_embedding.pt"

# Settings that change what a draft head computes, each with the only value that is supported.
_FIXED: tuple[tuple[str, float | bool | None], ...] = (
    ("final_logit_softcapping", None),
    ("input_embedding_scale", 1),
    ("output_multiplier", 1),
    ("logit_scale", 1),
    ("use_aux_hidden_state", True),
    ("norm_before_fc", False),
    ("fc_norm", False),
    ("is_neox_style", True),  # whether the two halves of a head are rotated together, and not neighbours
    ("rope_is_neox_style", True),
    ("attention_sink_bias", False),  # of MiMo, like the next two
    ("add_swa_attention_sink_bias", False),
    ("attention_value_scale", 1),
)


def refuse_mask_embedding(folder: Folder):
    """Raise a ``Refusal`` if a file beside the weights replaces the embedding of the mask token, as in MiMo's heads."""
    if folder.has(MASK_EMBEDDING):
        raise Refusal(
            f"{folder.given}/{MASK_EMBEDDING}: an embedding of mask slots in a file of its own is not supported, and "
            "without it the draft head would read another one than it was trained with"
        )


def said_of_anchor(settings: Settings) -> bool | None:
    """Whether slot i of the block predicts the token behind it, the anchor's slot the first draft; None if nothing says so.

    If not, the anchor's slot predicts nothing, and the block makes one draft less than it has slots."""
    return settings.flag(*ANCHOR_KEYS)


def projector(settings: Settings) -> str | None:
    """SpecForge's and Model Optimizer's name for the kind of draft head, of ``PROJECTORS``; None if config.json lacks it."""
    kind = settings.text(PROJECTOR, None)
    if kind not in (None, *PROJECTORS):
        raise settings.refuse(PROJECTOR, f"one of {', '.join(PROJECTORS)}, because no other draft heads are supported")
    return kind


def causal(settings: Settings, windows: Sequence[int | None]) -> tuple[bool, ...]:
    """Of each layer, whether its slots see none of those behind them."""
    if (said := settings.flag(*CAUSAL_KEYS)) is not None:
        return (said,) * len(windows)
    return tuple(window is not None for window in windows)


def with_windows_of_all(settings: Settings, layers: ModelConfig) -> ModelConfig:
    """The config of the layers with the window that ``use_swa`` gives all of them, if ``layer_types`` gives none to any."""
    sizes = [settings.integer(key, None) for key in ("swa_window_size", "sliding_window")]
    window = next((size for size in sizes if size is not None), None)
    if window is None or any(layers.windows) or not settings.object_with("use_swa").flag("use_swa"):
        return layers
    return dataclasses.replace(layers, windows=(window,) * layers.num_layers)


def window_rules(
    settings: Settings, windows: Sequence[int | None], causal: Sequence[bool], *, from_anchor: bool = False
) -> dict[str, bool]:
    """Where windows begin: ``windows_from_anchor`` and ``windows_by_slot`` of ``BlockConfig``.

    Args:
      settings: where config.json has settings.
      windows, causal: of each layer, as they were read.
      from_anchor: whether the tool that writes this layout counts windows from the anchor. If not, it counts them from
        each slot, as z-lab's own package, SpecForge and Model Optimizer do.

    Raises:
      Refusal: ``windows_from_anchor`` is there, and no layer has a window.
    """
    said, kinds = settings.flag(WINDOWS), {flag for flag, window in zip(causal, windows, strict=True) if window}
    if said is not None and not kinds:
        raise settings.refuse(WINDOWS, "nothing, because no layer has a window")
    anchored = from_anchor if said is None else said
    return {WINDOWS: anchored and True in kinds, "windows_by_slot": not anchored and False in kinds}


def require_supported(settings: Settings, windows: Sequence[int | None], anchor_first: bool):
    """Raise a ``Refusal`` if a setting that changes what is computed has a value that is not supported.

    Args:
      settings: where config.json has settings.
      windows: of each layer, as it was read.
      anchor_first: whether the anchor's slot drafts, as it was read.
    """
    settings.require_fixed(_FIXED)
    projector(settings)
    drafts = "drafts" if anchor_first else "does not draft"
    unless = f"because the anchor's slot {drafts} unless {ANCHOR_KEYS[0]} says otherwise"
    settings.only("shift_label", anchor_first, unless)  # of SpecForge and Model Optimizer
    widths = {window for window in windows if window is not None}
    if settings.object_with("use_swa").flag("use_swa") and not widths:
        raise settings.refuse(
            "use_swa", "false, because no layer has a window; else say how many tokens in sliding_window"
        )
    size = settings.integer("swa_window_size", None, low=0)
    if size is not None and widths and {size} != widths:
        raise settings.refuse("swa_window_size", f"{max(widths)}, the sliding_window of the layers")
