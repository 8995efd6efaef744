"""Draft heads of every kind in any format of weights, and beside each the float32 one that it stands for."""

import json

import numpy as np
import tiny_heads
from block_checkpoints import Kind
from heads import random_head
from safetensors.numpy import load_file
from tiny import write_weights

from jspec.checkpoints.export import export_draft
from jspec.config import ModelConfig
from jspec.config.heads import BlockConfig, MTPConfig
from jspec.models import flat_params

V, D = tiny_heads.V, tiny_heads.D
LAYERS = ModelConfig("Qwen3ForCausalLM", V, D, 96, 2, 4, 2, 16, 128, qk_norm=True)
DSPARK = BlockConfig(LAYERS, V, D, (1, 2), 4, 5, True, (False, False), "gated", 64, "markov")
SIZES = {"conv_taps": 2, "conv_group": 8, "selector_rank": 16, "candidates": 5}
EXPORTED = {
    "dflash": (BlockConfig(LAYERS, V, D, (1, 2), 4, 5, False, (False, False)), "native"),
    "dspark": (DSPARK, "native"),
    "dspark-speculators": (DSPARK, "speculators"),
    "dflash2": (BlockConfig(LAYERS, V, D, (1, 2), 4, 5, False, (False, False), **SIZES), "native"),
    "dflash2-speculators": (BlockConfig(LAYERS, V, D, (1, 2), 4, 5, False, (False, False), **SIZES), "speculators"),
    "mtp": (MTPConfig(ModelConfig("LlamaForCausalLM", V, D, 96, 2, 4, 2, 16, 128)), "native"),
}
TINY = {
    "eagle": lambda folder: tiny_heads.eagle(folder, num_hidden_layers=2),
    "eagle3": tiny_heads.eagle3,
    "deepspec": tiny_heads.deepspec_eagle3,
    "p-eagle": tiny_heads.p_eagle,
    "eagle3-speculators": tiny_heads.speculators,
    "p-eagle-speculators": lambda folder: tiny_heads.speculators(folder, "peagle"),
    "mlp": lambda folder: tiny_heads.mlp_speculator(folder, inner_dim=32),
    "medusa": lambda folder: tiny_heads.medusa(folder, file="model.safetensors"),
}
HEADS = (*TINY, *EXPORTED)


def written(folder, head: str):
    if head in TINY:
        return TINY[head](folder)
    config, layout = EXPORTED[head]
    params = flat_params(random_head(config))
    export_draft(folder, config, params, target_name="target", dtype="float32", layout=layout)
    return folder


def is_linear(name: str, array: np.ndarray) -> bool:
    """Whether a tensor is the weight of a linear map that llm-compressor would quantise; sizes are those of any format."""
    other = ("emb", "markov_w1", "lm_head", "confidence", "candidate_selector", "kernel_projection")
    whole = array.ndim == 2 and array.shape[0] % 8 == 0 and array.shape[1] % 16 == 0
    return whole and name.endswith(".weight") and not any(part in name for part in other)


def stored_head(path, head: str, kind: Kind, changes=None, change=lambda stored: stored, more=()):
    """A head in a format, and beside it, as ``<name>-wide``, the float32 one that it stands for.

    Args:
      path: the folder.
      head: one of ``HEADS``.
      kind: the format.
      changes: keys of config.json.
      change: what is done with the tensors of the stored head, by name, before they are written.
      more: names of tensors that are stored so, too.
    """
    wide = written(path.with_name(f"{path.name}-wide"), head)
    tensors, stored = load_file(wide / "model.safetensors"), {}
    for name, array in tensors.items():
        if is_linear(name, array) or name in more:
            parts, tensors[name] = kind.store(array)
            stored |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
        else:
            stored[name] = array
    path.mkdir()
    config = json.loads((wide / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": kind.config, **(changes or {})}))
    write_weights(path, change(stored))
    write_weights(wide, tensors)
    return path, wide
