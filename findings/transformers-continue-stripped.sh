#!/usr/bin/env bash
# transformers 5.24.0: continue_final_message fails where the chat template does not write reasoning of earlier messages.
#
# The templates of DeepSeek, GLM and Gemma 4 write of a message what stands behind its reasoning alone. apply_chat_template(..,
# continue_final_message=True) looks for the message's whole content in the text that they made, does not find it, and raises
# "the final message does not appear in the chat". So a message that was begun with ended reasoning cannot be gone on with.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check transformers==5.24.0 tokenizers jinja2
"$folder/venv/bin/python" - <<'PY' 2>/dev/null
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
tokenizer.chat_template = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
    "{% endfor %}"
)
user, begun = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>It greets.</think>Good"}
plain = [user, {"role": "assistant", "content": "Good"}]
print(tokenizer.apply_chat_template(plain, tokenize=False, continue_final_message=True))
try:
    print(tokenizer.apply_chat_template([user, begun], tokenize=False, continue_final_message=True))
except ValueError as error:
    print("ValueError:", error)
    assert "final message" in str(error), "the behaviour has changed"
else:
    raise SystemExit("the behaviour has changed: the message goes on")
PY
