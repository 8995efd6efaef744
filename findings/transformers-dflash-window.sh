#!/usr/bin/env bash
# transformers 5.24.0: a slot in a DFlash layer with a window of W tokens sees W tokens before its own; in z-lab's package it sees W - 1.
#
# MuseGlimmerAssistantModel, the DFlash class of transformers, takes a mask for encoders, whose windows count W to either side. Its causal
# layers of other models, z-lab's own package for DFlash heads (dflash 0.1.0), SpecForge, vLLM and Model Optimizer count the slot itself
# among the W. So the same weights and the same `sliding_window` draft from one more token in transformers. Below, the hidden states of both
# are apart, and are equal once z-lab's package is told W + 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps dflash==0.1.0
TRANSFORMERS_NO_ADVISORY_WARNINGS=1 "$folder/venv/bin/python" - <<'PY'
import torch
import transformers
from dflash.model import DFlashDraftModel
from transformers.cache_utils import DFlashCache

W, BLOCK, CONTEXT, D = 8, 5, 20, 32
sizes = {"hidden_size": D, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
sizes |= {"num_hidden_layers": 2, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
kinds, ids = ["sliding_attention"] * 2, [1, 3]

torch.manual_seed(0)
own = {"layer_types": kinds, "sliding_window": W, "block_size": BLOCK, "mask_token_id": 96, "target_layer_ids": ids}
theirs = transformers.MuseGlimmerAssistantModel(transformers.MuseGlimmerAssistantConfig(**sizes, **own)).eval()
with torch.no_grad():
    for parameter in theirs.parameters():
        noise = torch.randn_like(parameter)
        parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 else parameter.shape[-1] ** -0.5 * noise)
block, context = torch.randn(1, BLOCK, D), torch.randn(1, CONTEXT, 2 * D)
positions = torch.arange(CONTEXT + BLOCK)[None]
names = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


@torch.no_grad()
def by_transformers():
    cache = DFlashCache(config=theirs.config)
    cache.activate_past_recording()
    cache.set_previous_accepted_tokens(CONTEXT)
    read = {"noise_embeds": block, "context_hidden_states": context, "position_ids": positions}
    return theirs(**read, cache=cache).last_hidden_state


@torch.no_grad()
def by_zlab(window):
    config = transformers.Qwen3Config(**sizes, vocab_size=97, max_position_embeddings=128)
    settings = {"layer_types": kinds, "use_sliding_window": True, "sliding_window": window, "is_causal": False}
    settings |= {"num_target_layers": 6, "block_size": BLOCK}
    for name, value in settings.items():
        setattr(config, name, value)
    config.dflash_config = {"target_layer_ids": ids, "block_size": BLOCK, "mask_token_id": 96}
    model = DFlashDraftModel(config).eval()
    model.load_state_dict({names.get(name, name): weight for name, weight in theirs.state_dict().items()})
    return model(position_ids=positions, noise_embedding=block, target_hidden=context)


hidden = by_transformers()
apart, same = (((hidden - by_zlab(window)).abs().max() / hidden.abs().max()).item() for window in (W, W + 1))
print(f"hidden states of a block with a window of {W} are {apart:.2f} of the largest apart; with {W + 1} in z-lab's package, {same:.0e}")
assert apart > 0.1 and same < 1e-5, "the behaviour has changed"
PY
