"""Tiny checkpoints with multi-token prediction layers behind their last layer."""

import json

import numpy as np
from safetensors.numpy import load_file
from tiny import tiny_checkpoint, write_weights

from convert import load_folder
from jspec.checkpoints.huggingface.names import renamed, tensor_table
from jspec.checkpoints.huggingface.parts import rearranged_tensors
from jspec.config.heads import MTPConfig, mtp_layers


def with_layers(path, architecture="Glm4MoeLiteForCausalLM", layers=1, **overrides):
    """A random checkpoint with multi-token prediction layers behind its last layer."""
    folder = tiny_checkpoint(path, architecture, **overrides)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": layers}))
    target, _ = load_folder(folder)
    own, first, rng = mtp_layers(target, layers), target.num_layers, np.random.default_rng(7)
    apart = rearranged_tensors(own, range(first, first + layers))
    parts = {part.name for whole in apart.values() for part in whole.parts}
    source = placements(target, layers)
    shapes = {name: at.shape for name, at in source.items() if name not in parts}
    shapes |= {name: whole.shape for name, whole in apart.items()}
    tensors = load_file(folder / "model.safetensors")
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape)
        tensors[name] = (1 + 0.1 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5).astype(np.float32)
    for k in range(first, first + layers):  # copies of the target's
        tensors[f"model.layers.{k}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        tensors[f"model.layers.{k}.shared_head.head.weight"] = tensors["lm_head.weight"]
    write_weights(folder, tensors)
    return folder


def placements(target, layers):
    """Tensor name -> placement, of the layers that are yet to be written."""
    places = {f"layers.{i}.": f"model.layers.{target.num_layers + i}." for i in range(layers)}
    return renamed(tensor_table(MTPConfig(mtp_layers(target, layers))), places)
