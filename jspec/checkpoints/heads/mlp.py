"""MLP speculators (Wertheimer et al., 2024) as ibm-fms publishes them, with or without the prefix ``speculator.``."""

from typing import Any

from jspec.checkpoints.fields import Fields
from jspec.checkpoints.heads.format import HeadFormat
from jspec.checkpoints.layout import Layout
from jspec.checkpoints.names import renamed, tensor_table
from jspec.checkpoints.tensor import Tensor
from jspec.heads import MLPConfig

PREFIX = "speculator."
ARCHITECTURE = "MLPSpeculatorPreTrainedModel"
METHODS = (
    None,
    "sum_rnn",
)  # names of the recurrence; ArcticInference has another, "sum_lstm", under the same model_type
MAX_STAGES = 256


def read(fields: Fields, tensors: dict[str, Tensor]) -> Layout:
    """The layout of such a folder."""
    if fields.raw.get("architectures") not in (None, [ARCHITECTURE]):
        raise fields.refuse("architectures", f"[{ARCHITECTURE!r}]; other MLP speculators are not supported")
    if fields.raw.get("method") not in METHODS:
        raise fields.refuse("method", "'sum_rnn' or nothing; other recurrences are not supported")
    hidden_size = fields.integer("emb_dim")
    config = MLPConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        inner_size=fields.integer("inner_dim", 0, low=0) or hidden_size,
        num_stages=fields.integer("n_predict", high=MAX_STAGES),
        tied=fields.flag("tie_weights"),
        scale_input=fields.flag("scale_input"),
    )
    prefix = PREFIX if any(name.startswith(PREFIX) for name in tensors) else ""
    spares = {copy: of for copy, of in _spares(config, prefix).items() if copy in tensors}
    table = renamed(tensor_table(config), {PREFIX: prefix})
    return Layout(config, "MLP speculator", table, tensors, spares=spares, shared_by="tie_weights")


def _spares(config: MLPConfig, prefix: str) -> dict[str, str]:
    """Every name under which a tied checkpoint may repeat a tensor -> the name that counts."""
    spares: dict[str, str] = {}
    if not config.tied:
        return spares
    for i in range(1, config.num_stages):
        for name in ("emb.{}.weight", "ln.{}.weight", "ln.{}.bias", "head.{}.weight"):
            spares[prefix + name.format(i)] = prefix + name.format(0)
        if i > 1:
            spares[f"{prefix}proj.{i}.weight"] = f"{prefix}proj.1.weight"
    return spares


def hf_config(config: MLPConfig) -> dict[str, Any]:
    """config.json of a speculator, which drafts a chain."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "mlp_speculator",
        "vocab_size": config.vocab_size,
        "emb_dim": config.hidden_size,
        "inner_dim": config.inner_size,
        "n_predict": config.num_stages,
        "top_k_tokens_per_head": [1] * config.num_stages,
        "n_candidates": 1,
        "tie_weights": config.tied,
        "scale_input": config.scale_input,
    }


FORMAT = HeadFormat(
    recognises=lambda fields, _: fields.raw.get("model_type") == "mlp_speculator",
    read=lambda _, fields, tensors, __: read(fields, tensors),
    write_config=lambda config, *_: hf_config(config),
)
