#!/usr/bin/env bash
# speculators 0.9.0 with transformers 5.19.0: a head without an embedding is loaded with whatever was in memory, now and then.
#
# An EAGLE-3 or P-EAGLE head may leave embed_tokens to its target. DraftVocabMixin fills it with NaN before it loads the file, and takes
# the target's embedding afterwards where it finds NaN. transformers makes tensors that a file lacks anew, and marks them as made: their
# memory is not written. If it happens to hold no NaN, the target's embedding is not taken, and nothing warns. vLLM takes the target's.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
pip transformers==5.19.0 torch==2.13.0 datasets pydantic-settings loguru openai httpx aiohttp
pip --no-deps speculators==0.9.0 hs-connectors==0.9.0
"$folder/venv/bin/python" - "$folder" 2>/dev/null <<'PY'
import sys

import speculators
import torch
import transformers
from safetensors.torch import load_file, save_file
from speculators.proposals.greedy import GreedyTokenProposalConfig

folder, V, D = sys.argv[1], 97, 64
sizes = {"vocab_size": V, "hidden_size": D, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
target = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=6))
target.save_pretrained(f"{folder}/target")
config = speculators.Eagle3SpeculatorConfig(
    transformer_layer_config=transformers.LlamaConfig(**sizes, num_hidden_layers=1),
    draft_vocab_size=V,
    eagle_aux_hidden_state_layer_ids=[1, 2, 3],
    speculators_config=speculators.SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
        default_proposal_method="greedy",
        verifier=speculators.VerifierConfig(name_or_path=f"{folder}/target", architectures=["LlamaForCausalLM"]),
    ),
)
model = speculators.Eagle3DraftModel(config)
model.load_verifier_weights()
model.save_pretrained(f"{folder}/head")
tensors = load_file(f"{folder}/head/model.safetensors")
del tensors["embed_tokens.weight"]
save_file(tensors, f"{folder}/head/model.safetensors", metadata={"format": "pt"})
wrong = 0
for _ in range(30):
    used = [torch.randn(V, D) for _ in range(200)]  # memory that others have written to
    del used
    loaded = speculators.SpeculatorModel.from_pretrained(f"{folder}/head").embed_tokens.weight
    wrong += not torch.equal(loaded, target.model.embed_tokens.weight)
print(f"of 30 loads, {wrong} have another embedding than the target's")
assert wrong, "the behaviour has changed"
PY
