"""Tiny checkpoints of models with gated delta nets that transformers wrote, with a layer for multi-token prediction.

transformers has no such layer for these classes. Here it is made of its own decoder layer, and computed as published."""

import copy
import re
from typing import Any, NamedTuple

import numpy as np
from parity_cases import CASES, SIZES
from safetensors.numpy import load_file, save_file

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
GATE_UP, DOWN = "gate_up_proj", "down_proj"


class Reference(NamedTuple):
    """Modules of transformers and torch with random weights.

    Attributes:
      model: the language model.
      fuse, norms, layer: of the layer for multi-token prediction: the linear map from embedding and feature; the norms of
        the embedding, of the feature and of the outputs; and the decoder layer with attention.
    """

    model: Any
    fuse: Any
    norms: tuple[Any, Any, Any]
    layer: Any

    def features(self, tokens: np.ndarray):
        """``[1, length, D]``: the hidden states of a text after the final norm."""
        import torch

        with torch.no_grad():
            return self.model.model(torch.tensor(tokens)[None], use_cache=False).last_hidden_state

    def slots(self, tokens: np.ndarray, features):
        """The outputs ``[1, length, D]`` and the logits ``[length, V]`` of slots that read ``tokens`` and ``features``."""
        import torch

        with torch.no_grad():
            embedded = self.model.model.embed_tokens(torch.tensor(tokens)[None])
            joined = torch.cat([self.norms[0](embedded), self.norms[1](features)], dim=-1)
            length = len(tokens)
            positions = torch.arange(length)[None]
            rotations = self.model.model.rotary_emb(joined, positions)
            mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
            out = self.layer(self.fuse(joined), rotations, attention_mask=mask, position_ids=positions)
            out = self.norms[2](out)
            return out, self.model.lm_head(out)[0].numpy()


def save_hybrid(folder, case: str, *, stacked: bool = False, **changes) -> Reference:
    """A checkpoint with a layer for multi-token prediction.

    Args:
      folder: where to.
      case: of ``parity_cases.CASES``.
      stacked: whether the maps of all experts of a layer are in one tensor, as Qwen3.5 publishes them.
      changes: further settings.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    family, settings = CASES[case]
    prefix = family if family == "Qwen3Next" else f"{family}Text"
    settings = copy.deepcopy({**SIZES, **settings, **changes, "attn_implementation": "eager"})
    config = getattr(transformers, f"{prefix}Config")(**settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    number = config.layer_types.index("full_attention")
    kind, norm = type(model.model.layers[number]), type(model.model.norm)
    D = config.hidden_size
    fuse, norms = torch.nn.Linear(2 * D, D, bias=False), tuple(norm(D, eps=config.rms_norm_eps) for _ in range(3))
    sparse = [i for i, one in enumerate(model.model.layers) if hasattr(one.mlp, "experts")]
    full = next((i for i in sparse if config.layer_types[i] == "full_attention"), number)
    layer = kind(config, full).eval()
    for module in (model, fuse, *norms, layer):
        randomise(module)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    mtp = {"fc.weight": fuse.weight}
    for name, one in zip(("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), norms, strict=True):
        mtp[f"{name}.weight"] = one.weight
    mtp |= {f"layers.0.{name}": parameter for name, parameter in layer.named_parameters()}
    found = {f"mtp.{name}": np.array(parameter.detach().numpy()) for name, parameter in mtp.items()}
    tensors |= found if stacked else split(found)
    tensors = stack(tensors) if stacked else tensors
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    return Reference(model, fuse, norms, layer)


def randomise(module):
    """Random weights, with norms near those of a trained model, and states that remember from a few tokens to hundreds."""
    import torch

    with torch.no_grad():
        for name, parameter in module.named_parameters(prefix="norm" if "Norm" in type(module).__name__ else ""):
            noise = torch.randn_like(parameter)
            if name.endswith("A_log"):
                parameter.copy_(1.5 * noise - 3)
            elif name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            elif "norm" in name:
                parameter.copy_(("linear_attn" in name) + 0.1 * noise)
            else:
                parameter.copy_(parameter.shape[-1] ** -0.5 * noise)


def stack(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """``tensors``, with the maps of all experts of a layer in one tensor: ``[X, 2 Fe, D]`` and ``[X, D, Fe]``."""
    others, experts = {}, {}
    for name, array in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            others[name] = array
        else:
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = array
    for at, maps in experts.items():
        numbers = sorted({number for number, _ in maps})
        pairs = [np.concatenate([maps[number, "gate"], maps[number, "up"]]) for number in numbers]
        others[f"{at}.{GATE_UP}"] = np.stack(pairs)
        others[f"{at}.{DOWN}"] = np.stack([maps[number, "down"] for number in numbers])
    return others


def split(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """``tensors``, with a tensor for each map of an expert."""
    found = {}
    for name, array in tensors.items():
        at = name.rpartition(".")[0]
        if name.endswith(f"experts.{GATE_UP}"):
            for number, pair in enumerate(array):
                gate, up = np.split(pair, 2)
                found |= {f"{at}.{number}.gate_proj.weight": gate, f"{at}.{number}.up_proj.weight": up}
        elif name.endswith(f"experts.{DOWN}"):
            found |= {f"{at}.{number}.down_proj.weight": down for number, down in enumerate(array)}
        else:
            found[name] = array
    return found
