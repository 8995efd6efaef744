"""Writes ``nemo_automodel.npz``: EAGLE heads of NVIDIA NeMo Automodel, and what it computes.

    PYTHONPATH=FOLDER python tests/golden/nemo_automodel_heads.py tests/golden/nemo_automodel.npz

FOLDER is the unpacked wheel of nemo-automodel 0.7.0, beside ``datasets`` and ``torchdata``, which it imports; tests install
none of them. ``README.md`` has what is stored."""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from nemo_automodel.components.checkpoint.config import CheckpointingConfig
from nemo_automodel.components.speculative.eagle.core_v12 import EagleTrainerModule
from nemo_automodel.components.speculative.eagle.registry import resolve_eagle1_draft_spec
from nemo_automodel.components.speculative.eagle.target_v12 import HFEagleTargetModel
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

V, T, CHAIN = 37, 16, (9, 3)
SIZES = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 6,
    "max_position_embeddings": 64,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 100.0}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
CASES = {
    "llama": LlamaForCausalLM(LlamaConfig(**SIZES, **GROUPED, rope_parameters=PLAIN)),
    "llama-two-layers": LlamaForCausalLM(
        LlamaConfig(
            **SIZES,
            **GROUPED,
            attention_bias=True,
            mlp_bias=True,
            fc_bias=True,
            rope_parameters={**LLAMA3, "original_max_position_embeddings": 16},
        )
    ),
    # The windows of the target, which the head has not, and queries of twice the hidden size.
    "qwen3": Qwen3ForCausalLM(
        Qwen3Config(
            **SIZES,
            **GROUPED,
            head_dim=8,
            qkv_bias=True,
            use_sliding_window=True,
            sliding_window=4,
            max_window_layers=2,
        )
    ),
}


def random_parameters(model, seed: int):
    """Gives every parameter a value that counts."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        scale = 1 if "embed" in name else parameter.shape[-1] ** -0.5
        parameter.copy_(noise * scale if parameter.ndim > 1 else 0.3 * noise + ("norm" in name))


def written(draft, folder: str) -> Path:
    """The folder that the recipes' checkpointer writes of a draft head for other programs."""
    keys = list(draft.state_dict())
    config = CheckpointingConfig(checkpoint_dir=folder, save_consolidated=True, model_state_dict_keys=keys)
    config.build(dp_rank=0, tp_rank=0, pp_rank=0).save_model(draft, folder, is_final_checkpoint=True)
    return Path(folder) / "model" / "consolidated"


def computed(target, draft, tokens) -> dict[str, torch.Tensor]:
    """What the head computes of a text, and of drafts, each of which reads the output of the one before."""
    everything = torch.ones_like(tokens)
    batch = HFEagleTargetModel(target).generate_batch(tokens, everything, everything)
    trainer = EagleTrainerModule(draft, target_lm_head=target.lm_head).eval()

    def read(features):
        hidden = draft(batch.input_ids, features, batch.attention_mask)
        return hidden, trainer.compute_logits(hidden)

    features = batch.input_hidden_states
    hidden, logits = read(features)
    found = {"features": features[0], "hidden": hidden[0], "logits": logits[0]}
    (first, length), fed = CHAIN, features.clone()
    for i in range(first, first + length):
        fed[:, i + 1] = hidden[:, i]
        hidden, logits = read(fed)
    return found | {"chain": logits[0, first + 1 : first + length + 1]}


def main(path: Path):
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, V, size=(1, T)))
    arrays: dict[str, np.ndarray] = {}
    for case, target in CASES.items():
        name = type(target).__name__
        layers = {"draft_num_hidden_layers": 1 + case.endswith("two-layers")}
        config = {**target.config.to_dict(), "architectures": ["LlamaEagleDraftModel"], **layers}  # as in its recipe
        draft = resolve_eagle1_draft_spec([name]).draft_cls(type(target.config).from_dict(config)).float().eval()
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            random_parameters(target.eval(), 5)
            random_parameters(draft, 6)
            draft.copy_embeddings_from_target(target.get_input_embeddings())
            files = written(draft, folder)
            found = {f"w.{name}": a for file in files.glob("*.safetensors") for name, a in load_file(file).items()}
            config = json.loads((files / "config.json").read_text())
            found |= computed(target, draft, tokens)
            found |= {"embed": target.get_input_embeddings().weight, "lm_head": target.lm_head.weight}
            found["token_ids"] = tokens[0]
        arrays |= {f"{case}/{name}": array.detach().numpy() for name, array in found.items()}
        arrays[f"{case}/config_json"] = np.array(json.dumps(config))
    np.savez_compressed(path, **arrays)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
