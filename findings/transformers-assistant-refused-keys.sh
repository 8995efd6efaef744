#!/usr/bin/env bash
# transformers 5.24.0: an assistant of Gemma 4 attends to keys of drafts that the target refused.
#
# SinglePositionMultiTokenCandidateGenerator shows the assistant the target's keys up to the length of the text. The newest token is
# not read yet when drafting begins, so the slot at its position has the key of the draft that it replaced, in every round but the
# first of a text. In layers with a window the cache is shorter than the text, and the cut does not reach any refused draft at all.
# The text is the target's own for all that. Below, all drafts of the second round differ from those of a new text of the same tokens.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
TRANSFORMERS_NO_ADVISORY_WARNINGS=1 "$folder/venv/bin/python" - <<'PY'
import torch
import transformers
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator as Generator

V, kinds = 96, ["sliding_attention", "full_attention"]
sizes = {"vocab_size": V, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
sizes |= {"global_head_dim": 16, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "sliding_window": 64, "pad_token_id": None}


def randomised(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(parameter.shape[-1] ** -0.5 * torch.randn_like(parameter))
    return model.eval()


torch.manual_seed(0)
text = transformers.Gemma4TextConfig(**sizes, hidden_size=64, num_hidden_layers=2, layer_types=kinds, num_kv_shared_layers=0)
own = transformers.Gemma4TextConfig(**sizes, hidden_size=32, num_hidden_layers=2, layer_types=kinds, num_kv_shared_layers=2)
target = randomised(transformers.Gemma4ForCausalLM(text))
assistant = randomised(
    transformers.Gemma4AssistantForCausalLM(transformers.Gemma4AssistantConfig(text_config=own, backbone_hidden_size=64))
)
assistant.generation_config.num_assistant_tokens = 3
seen, drafts = {}, Generator.get_candidates


def telling(self, input_ids, *args, **kwargs):
    tokens, logits = drafts(self, input_ids, *args, **kwargs)
    seen[input_ids.shape[1]] = logits
    return tokens, logits


Generator.get_candidates = telling
how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "assistant_model": assistant}
prompt = torch.arange(3, 20)[None]
whole = target.generate(prompt, max_new_tokens=12, **how)
rounds, seen = seen, {}
second = sorted(length for length, logits in rounds.items() if logits is not None)[1]
again = target.generate(whole[:, : second - 1], max_new_tokens=6, **how)
assert torch.equal(again[0], whole[0, : again.shape[1]]), "the text differs"
apart = ((rounds[second] - seen[second]).abs().max() / seen[second].abs().max()).item()
print(f"behind the same {second} tokens, drafts of a second round and of a first are {apart:.2f} of the largest logit apart")
assert apart > 0.1, "the behaviour has changed"
PY
