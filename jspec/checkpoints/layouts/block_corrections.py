"""The settings of Domino and LiLiCorr heads in config.json, as NVIDIA Model Optimizer (0.48) exports them.

Both have the tensors of a DFlash head and others beside them (``jspec.models.heads.domino`` and ``lilicorr``), whose sizes are
in ``dflash_config``. ``projector_type`` says which it is. A LiLiCorr head may have convolutions, as in ``block_dflash2``.
"""

from collections.abc import Collection
from typing import Any

from jspec._validation import require
from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.layouts.block_dflash2 import BASE, GROUP, TAPS, read_convolutions
from jspec.checkpoints.layouts.block_settings import DFLASH, PROJECTOR
from jspec.checkpoints.layouts.eagle3_settings import Settings
from jspec.checkpoints.layouts.format import architectures
from jspec.config.heads import BlockConfig
from jspec.config.heads.block_corrections import DominoConfig, LiLiCorrConfig

DOMINO, LILICORR = "domino", "lilicorr"
STATE, INNER, UNCORRECTED = "gru_hidden_dim", "emb_dim", "pure_draft_prefix_len"
ENABLED, CANDIDATES, RATIO = "lilicorr_enabled", "lilicorr_candidate_topk", "lilicorr_mlp_ratio"
SIZES = ("lilicorr_hidden_size", "lilicorr_num_layers", "lilicorr_num_heads", "lilicorr_factor_dim")
SCALE, EPS = "lilicorr_logit_scale", "lilicorr_vector_eps"


def kind_of(fields: Fields, settings: Settings, names: Collection[str]) -> str | None:
    """``domino`` or ``lilicorr`` if projector, class or tensors are those of such a head; None if they are not.

    Raises:
      Refusal: the projector is another one.
    """
    said = settings.text(PROJECTOR, None)
    for kind, tensor in ((DOMINO, "prefix_gru.weight_hh_l0"), (LILICORR, "lilicorr.rank_embedding")):
        if said == kind or kind in architectures(fields) or tensor in names:
            settings.only(PROJECTOR, kind, "because of the class or the tensors of the head")
            return kind
    return None


def read_correction(kind: str, settings: Settings, tensors: dict[str, Tensor], hidden_size: int) -> dict[str, Any]:
    """The fields of ``BlockConfig`` that a head of this kind has and others do not.

    Args:
      kind: of ``kind_of``.
      settings: where config.json has settings.
      tensors: name -> tensor, for every tensor in the files.
      hidden_size: D.

    Raises:
      Refusal: config.json does not say a size, or a setting is not supported.
    """
    if kind == DOMINO:
        sizes = settings.integer(STATE), settings.integer(INNER), settings.integer(UNCORRECTED, 1, low=0)
        settings.objects[-1].only(INNER, sizes[1], f"as in {DFLASH}")  # where the tool writes it once more
        return {"domino": DominoConfig(*sizes)}
    settings.only(ENABLED, True, "because there are tensors of LiLiCorr, or its class")
    width, layers, heads, factor = map(settings.integer, SIZES)
    ratio, scale, eps = (settings.object_with(key).number(key) for key in (RATIO, SCALE, EPS))
    own = LiLiCorrConfig(width, layers, heads, max(int(width * ratio), 1), factor, scale, eps)
    convolved = BASE in tensors or any(settings.integer(key, 0, low=0) for key in (TAPS, GROUP))
    convolutions = read_convolutions(settings, tensors, hidden_size) if convolved else {}
    return {"lilicorr": own, "candidates": settings.integer(CANDIDATES), **convolutions}


def require_exportable(config: BlockConfig):
    """Raise a ValueError if the head is one of these two kinds, which no layout here writes."""
    for kind in (DOMINO, LILICORR):
        require(
            getattr(config, kind) is None, kind, getattr(config, kind), "None: such a head is read, and not exported"
        )
