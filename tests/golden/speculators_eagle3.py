"""Writes ``eagle3_windows.npz``: an EAGLE-3 head of the speculators package with a sliding layer, and what it computes.

    PYTHONPATH=FOLDER python tests/golden/speculators_eagle3.py tests/golden/eagle3_windows.npz

FOLDER is the unpacked wheel of speculators 0.9.0, beside hs-connectors 0.9.0, datasets and pydantic-settings, which it
imports; tests install none of them. ``README.md`` has what is stored."""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

V, D, T, WINDOW = 37, 16, 14, 5


def random_head() -> Eagle3DraftModel:
    """A head of two layers, of which the first slides, every parameter of which counts."""
    layers = LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )
    layers._attn_implementation = "sdpa"
    proposal = GreedyTokenProposalConfig(speculative_tokens=3)
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    methods = SpeculatorsConfig(
        algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
    )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=V,
        eagle_aux_hidden_state_layer_ids=[1, 3, 5],
        speculators_config=methods,
    )
    model = Eagle3DraftModel(config).float().eval()
    generator = torch.Generator().manual_seed(6)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        scale = 1 if "embed" in name else parameter.shape[-1] ** -0.5
        parameter.copy_(noise * scale if parameter.ndim > 1 else 1 + 0.2 * noise)
    return model


def main(path: Path):
    rng = np.random.default_rng(1)
    tokens, features = rng.integers(0, V, size=T + 1), rng.standard_normal((T, 3 * D)).astype(np.float32)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        model, logits = random_head(), []
        model.lm_head.register_forward_hook(lambda *call: logits.append(call[2][0].clone()))
        inputs = torch.from_numpy(tokens[None, 1:]), torch.zeros(1, T, dtype=torch.long)
        model(torch.from_numpy(features)[None], *inputs, position_ids=torch.arange(T)[None], ttt_steps=2)
        model.save_pretrained(folder)
        found = {f"w.{name}": array for name, array in load_file(Path(folder) / "model.safetensors").items()}
        config = json.loads((Path(folder) / "config.json").read_text())
    arrays = {name: array.numpy() for name, array in found.items()}
    arrays |= {"logits": logits[0].numpy(), "next_logits": logits[1].numpy()}
    arrays |= {"token_ids": tokens, "features": features, "config_json": np.array(json.dumps(config))}
    np.savez_compressed(path, **arrays)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
