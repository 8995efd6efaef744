"""Writes ``zlab_windows.npz``: what z-lab's package computes of its DFlash and DFlash2 heads whose layers have windows.

    PYTHONPATH=FOLDER python tests/golden/zlab_windows.py tests/golden/zlab_windows.npz

FOLDER is the unpacked wheel of dflash 0.1.0, which tests do not install. The weights and inputs are those of ``dflash.npz``
and ``dflash2.npz``. ``README.md`` has what is stored."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

WINDOWS = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6, "use_sliding_window": True}
# Of each case: the files with its weights, the last of which has its config.json, the class, and other settings.
CASES = {
    "dflash": (("dflash",), DFlashDraftModel, {}),  # a layer with a window is causal
    "dflash-both-ways": (("dflash",), DFlashDraftModel, {"is_causal": False}),
    "dflash2": (("dflash", "dflash2"), DFlash2DraftModel, {"is_causal": False}),
}


def block_hidden(files, kind, settings, inputs) -> np.ndarray:
    """The hidden states of the blocks at all anchors, ``[4, 5, 32]``."""
    arrays = [dict(np.load(Path(__file__).parent / f"{file}.npz")) for file in files]
    config = Qwen3Config(**json.loads(str(arrays[-1]["config_json"])))
    for name, value in {**WINDOWS, **settings}.items():
        setattr(config, name, value)
    model = kind(config).float().eval()
    weights = {name[2:]: torch.from_numpy(a) for some in arrays for name, a in some.items() if name.startswith("w.")}
    codebooks = "candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"
    model.load_state_dict({f"{name}.weight" if name in codebooks else name: a for name, a in weights.items()})
    streams = sorted((name for name in inputs if name.startswith("S_")), key=lambda name: int(name[2:]))
    features = torch.from_numpy(np.concatenate([inputs[name] for name in streams], axis=-1))[None]
    found, n = [], model.block_size
    for start in inputs["starts"].tolist():
        block = torch.tensor([inputs["token_ids"][start], *[model.mask_token_id] * (n - 1)])
        read = {"target_hidden": features[:, :start], "position_ids": torch.arange(start + n)[None]}
        found.append(model(noise_embedding=torch.from_numpy(inputs["embed"])[block][None], **read)[0].numpy())
    return np.stack(found)


def main(path: Path):
    inputs = dict(np.load(Path(__file__).parent / "dflash.npz"))
    with torch.no_grad():
        np.savez_compressed(path, **{name: block_hidden(*case, inputs) for name, case in CASES.items()})


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
