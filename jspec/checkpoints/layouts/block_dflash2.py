"""The settings of DFlash2 heads in config.json: the sizes of their convolutions and of their candidate selector.

The layers of a DFlash2 head have the tensors ``attention_conv.*`` and ``mlp_conv.*`` beside those of a DFlash head, and
``candidate_selector.*`` is beside the layers (``jspec.models.heads.dflash2``). Keys and tensors are the same in z-lab's
layout, where the keys are in ``dflash_config``, and in the speculators format, where they are at the top:

| key | what it is | tensor that shows it |
|---|---|---|
| ``conv_kernel_size`` | taps Tc of a convolution | ``base_kernel`` ``[2, Tc, D]`` |
| ``conv_group_size`` | numbers that share a computed kernel | ``kernel_projection.weight`` ``[2 Tc D / group, D]`` |
| ``selector_rank`` | rank Rs of the selector | ``predecessor_codebook`` ``[V, Rs]`` |
| ``selector_top_k`` | candidates of a slot | none |
"""

from collections.abc import Collection
from typing import Any

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.layouts.block_settings import PROJECTOR
from jspec.checkpoints.layouts.eagle3_settings import Settings
from jspec.checkpoints.layouts.format import architectures
from jspec.config.heads import BlockConfig

CLASS = "DFlash2DraftModel"
KIND = "dflash2"  # the speculators_model_type
TAPS, GROUP, RANK, CANDIDATES = "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"
BASE, PROJECTION = "layers.0.attention_conv.base_kernel", "layers.0.attention_conv.kernel_projection.weight"
CODEBOOK = "candidate_selector.predecessor_codebook"
DEFAULT_CANDIDATES = 16  # of the class in the speculators package


def is_dflash2(fields: Fields, settings: Settings, names: Collection[str]) -> bool:
    """Whether class, type, settings or tensors are those of a DFlash2 head."""
    named = KIND in (fields.raw.get("speculators_model_type"), settings.text(PROJECTOR, None))
    named = named or KIND in architectures(fields)
    said = any(settings.integer(key, 0, low=0) for key in (TAPS, GROUP, RANK, CANDIDATES))
    return named or said or BASE in names or CODEBOOK in names


def read_sizes(
    settings: Settings, tensors: dict[str, Tensor], hidden_size: int, candidates: int | None
) -> dict[str, int]:
    """The fields of ``BlockConfig`` that a DFlash2 head has and others do not.

    Args:
      settings: where config.json has settings.
      tensors: name -> tensor, for every tensor in the files.
      hidden_size: D.
      candidates: how many candidates a slot has if config.json does not say it; None if it has to.

    Raises:
      Refusal: config.json and the tensors contradict each other, or neither says a size.
    """
    codebook = tensors.get(CODEBOOK)
    return {
        **read_convolutions(settings, tensors, hidden_size),
        "selector_rank": _size(settings, RANK, None if codebook is None else codebook.shape[-1], CODEBOOK),
        "candidates": _size(settings, CANDIDATES, None, "", candidates),
    }


def read_convolutions(settings: Settings, tensors: dict[str, Tensor], hidden_size: int) -> dict[str, int]:
    """The sizes of convolutions, as ``read_sizes`` reads them."""
    base, projection = tensors.get(BASE), tensors.get(PROJECTION)
    taps = _size(settings, TAPS, base.shape[1] if base is not None and len(base.shape) == 3 else None, BASE)
    rows = None if projection is None else projection.shape[0]
    group = 2 * taps * hidden_size // rows if rows else None
    return {"conv_taps": taps, "conv_group": _size(settings, GROUP, group, PROJECTION)}


def _size(settings: Settings, key: str, shown: int | None, tensor: str, absent: int | None = None) -> int:
    """The size under ``key``, which has to be that of ``tensor`` where this shows it; ``absent`` if there is neither."""
    if shown is not None:
        settings.only(key, shown, f"because of the shape of tensor {tensor!r}")
        return shown
    return settings.integer(key) if absent is None else settings.integer(key, absent)


def size_fields(config: BlockConfig) -> dict[str, Any]:
    """The keys of config.json that ``read_sizes`` reads; empty for other heads."""
    if not config.is_dflash2:
        return {}
    sizes = config.conv_taps, config.conv_group, config.selector_rank, config.candidates
    return dict(zip((TAPS, GROUP, RANK, CANDIDATES), sizes, strict=True))
