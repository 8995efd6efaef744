"""The settings of Domino and LiLiCorr heads in config.json, as NVIDIA Model Optimizer (0.48) exports them.

Both have the tensors of a DFlash head and others beside them (``jspec.models.heads.domino``, ``lilicorr``), whose sizes are
in ``dflash_config``. ``projector_type`` says which it is. A LiLiCorr head may have convolutions, as in ``block_dflash2``."""

from typing import Any

from jspec._validation import require
from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.layouts.block_dflash2 import BASE, GROUP, TAPS, read_convolutions
from jspec.checkpoints.layouts.block_settings import PROJECTOR
from jspec.checkpoints.layouts.eagle3_settings import Settings
from jspec.checkpoints.layouts.format import architectures
from jspec.config.heads import BlockConfig
from jspec.config.heads.block_corrections import DominoConfig, LiLiCorrConfig

KINDS = {
    "domino": "prefix_gru.weight_hh_l0",
    "lilicorr": "lilicorr.rank_embedding",
}  # and a tensor that such a head has
_SIZES = ("lilicorr_hidden_size", "lilicorr_num_layers", "lilicorr_num_heads", "lilicorr_factor_dim")


def read_correction(fields: Fields, settings: Settings, tensors: dict[str, Tensor], hidden_size: int) -> dict[str, Any]:
    """The fields of ``BlockConfig`` that a Domino or LiLiCorr head has; none if projector, class and tensors are of neither.

    Args:
      fields, settings: config.json, and where it has settings.
      tensors: name -> tensor, for every tensor in the files.
      hidden_size: D.

    Raises:
      Refusal: config.json does not say a size, or a setting is not supported.
    """
    kinds = [kind for kind, tensor in KINDS.items() if kind in architectures(fields) or tensor in tensors]
    kind = kinds[0] if kinds else settings.text(PROJECTOR, None)
    if kind not in KINDS:
        return {}
    settings.only(PROJECTOR, kind, "because of the class or the tensors of the head")
    if kind == "domino":
        state, inner = settings.integer("gru_hidden_dim"), settings.integer("emb_dim")
        settings.objects[-1].only("emb_dim", inner, "as in dflash_config")  # where the tool writes it once more
        return {"domino": DominoConfig(state, inner, settings.integer("pure_draft_prefix_len", 1, low=0))}
    settings.only("lilicorr_enabled", True, "because there are tensors of LiLiCorr, or its class")
    width, layers, heads, factor = map(settings.integer, _SIZES)
    of_layers, of_scores = "lilicorr_mlp_ratio", ("lilicorr_logit_scale", "lilicorr_vector_eps")
    ratio, scale, eps = (settings.object_with(key).number(key) for key in (of_layers, *of_scores))
    own = LiLiCorrConfig(width, layers, heads, max(int(width * ratio), 1), factor, scale, eps)
    convolved = BASE in tensors or any(settings.integer(key, 0, low=0) for key in (TAPS, GROUP))
    convolutions = read_convolutions(settings, tensors, hidden_size) if convolved else {}
    return {"lilicorr": own, "candidates": settings.integer("lilicorr_candidate_topk"), **convolutions}


def require_exportable(config: BlockConfig):
    """Raise a ValueError if the head is one of these two kinds, which no layout here writes."""
    for kind in KINDS:
        own = getattr(config, kind)
        require(own is None, kind, own, "None: such a head is read, and not exported")
