"""MLP speculators (Wertheimer et al., 2024) as ibm-fms publishes them.

Tensor names may begin with ``speculator.``, as in ``speculator.emb.0.weight``, or not: both are published."""

from typing import Any

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.layouts.format import CheckpointFormat
from jspec.checkpoints.layouts.layers import refuse_draft_vocabulary
from jspec.checkpoints.tensors.layout import Layout
from jspec.checkpoints.tensors.names import renamed, tensor_table
from jspec.config.heads import MLPConfig

PREFIX = "speculator."
ARCHITECTURE = "MLPSpeculatorPreTrainedModel"
# Supported values of the key ``method``, which names the recurrence. ArcticInference publishes another recurrence,
# "sum_lstm", under the same model_type; it is refused.
RECURRENCES = (None, "sum_rnn")
MAX_STAGES = 256


def read(fields: Fields, tensors: dict[str, Tensor]) -> Layout:
    """The ``Layout`` of a folder in ibm-fms' layout."""
    if fields.raw.get("architectures") not in (None, [ARCHITECTURE]):
        raise fields.refuse("architectures", f"[{ARCHITECTURE!r}]; other MLP speculators are not supported")
    if fields.raw.get("method") not in RECURRENCES:
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
    duplicates = {copy: original for copy, original in _duplicates(config, prefix).items() if copy in tensors}
    table = renamed(tensor_table(config), {PREFIX: prefix})
    return Layout(config, "MLP speculator", table, tensors, duplicates=duplicates, tied_by="tie_weights")


def _duplicates(config: MLPConfig, prefix: str) -> dict[str, str]:
    """Tensor that a tied checkpoint may repeat -> the tensor that jspec loads; empty if the weights are not tied.

    Example: ``emb.1.weight`` -> ``emb.0.weight``."""
    duplicates: dict[str, str] = {}
    if not config.tied:
        return duplicates
    for i in range(1, config.num_stages):
        for name in ("emb.{}.weight", "ln.{}.weight", "ln.{}.bias", "head.{}.weight"):
            duplicates[prefix + name.format(i)] = prefix + name.format(0)
        if i > 1:  # proj.0 reads the target's hidden state, whose width may differ, so it is shared with no other
            duplicates[f"{prefix}proj.{i}.weight"] = f"{prefix}proj.1.weight"
    return duplicates


def hf_config(config: MLPConfig) -> dict[str, Any]:
    """The config.json of an MLP speculator that drafts a chain: one candidate token at each position.

    Raises:
      ValueError: it has a draft vocabulary, which the layout cannot state.
    """
    refuse_draft_vocabulary(config)
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


FORMAT = CheckpointFormat(
    recognises=lambda fields, _: fields.raw.get("model_type") == "mlp_speculator",
    read=lambda _, fields, tensors, __: read(fields, tensors),
    write_config=lambda config, *_: hf_config(config),
)
