#!/usr/bin/env bash
# transformers 5.24.0 with gguf 0.19.0: of a GGUF file whose tokenizer.ggml.pre is "smollm" or "qwen2", AutoTokenizer makes another tokenizer than
# the model's.
#
# tokenizer.ggml.pre is the key in which a GGUF file says by which rule texts are cut before byte pairs are merged. transformers has the rules of a
# few names. "smollm", by which each digit is cut off, is none of them, and GPT-2's rule takes its place, which leaves numbers in one piece. "qwen2"
# is one, but what belongs to it besides, that accents are composed first (NFC), as transformers' own class for Qwen2 does, is left out. Nothing
# warns, and such texts get other ids than the model was trained with.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check transformers==5.24.0 gguf==0.19.0 tokenizers==0.23.3 torch==2.13.0
TRANSFORMERS_NO_ADVISORY_WARNINGS=1 "$folder/venv/bin/python" - "$folder" <<'PY'
import logging
import sys
from pathlib import Path

import gguf
import numpy as np
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, Qwen2Tokenizer

folder = Path(sys.argv[1])
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
merges = ["1 2", "12 3", "Ã ©", "Ġ 1"]  # of digits, of a composed accent, and of a space and a digit
tokens = [*letters, *(merge.replace(" ", "") for merge in merges), "<|endoftext|>"]


def tokenizer_of(pre: str):
    where = folder / pre
    where.mkdir()
    writer = gguf.GGUFWriter(where / "model.gguf", "qwen2")
    for add, number in (
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 8),
        (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 8),
        (writer.add_head_count, 1),
        (writer.add_head_count_kv, 1),
    ):
        add(number)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return AutoTokenizer.from_pretrained(where, gguf_file="model.gguf")


logging.disable(logging.WARNING)
found = {pre: tokenizer_of(pre) for pre in ("qwen2", "smollm")}
vocabulary = {token: i for i, token in enumerate(tokens)}
original = Qwen2Tokenizer(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in merges])
for what, text in {"digits": "123 123", "a decomposed accent": "cafe\u0301"}.items():
    cut = {pre: tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) for pre, tokenizer in found.items()}
    qwen = original.convert_ids_to_tokens(original.encode(text))
    print(f"{what}: pre=smollm {cut['smollm']}, pre=qwen2 {cut['qwen2']}, Qwen2Tokenizer {qwen}")
    if what == "digits":
        assert cut["smollm"][0] == "123", "the behaviour has changed"
        assert cut["qwen2"] == qwen == ["1", "2", "3", "Ġ", "1", "2", "3"], "the behaviour has changed"
    else:
        assert cut["qwen2"] != qwen, "the behaviour has changed"
PY
