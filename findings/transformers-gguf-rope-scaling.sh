#!/usr/bin/env bash
# transformers 5.24.0 with gguf 0.19.0: the scaling of rotary positions that a GGUF file states is lost, and the model computes with plain ones.
#
# llama.rope.scaling.type, .factor and .original_context_length say how positions beyond the context of pretraining are rotated; llama.cpp's
# converter writes them for models with YaRN and with linear scaling. AutoConfig.from_pretrained(..., gguf_file=...) reads the base of the
# frequencies and none of these keys: rope_type is "default" for "yarn" and for "linear", nothing warns, and the model's frequencies are those of
# a file without the keys. A config.json with the same scaling gives others.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check transformers==5.24.0 gguf==0.19.0 torch==2.13.0
TRANSFORMERS_NO_ADVISORY_WARNINGS=1 "$folder/venv/bin/python" - "$folder" <<'PY'
import sys
import warnings
from pathlib import Path

import gguf
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

folder = Path(sys.argv[1])
warnings.simplefilter("error")  # so that a warning would end this program


def config_of(name: str, kind: gguf.RopeScalingType | None) -> LlamaConfig:
    where = folder / name
    where.mkdir()
    writer = gguf.GGUFWriter(where / "model.gguf", "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if kind is not None:
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return AutoConfig.from_pretrained(where, gguf_file="model.gguf")


plain = LlamaRotaryEmbedding(config_of("plain", None)).inv_freq
for name, kind in {"yarn": gguf.RopeScalingType.YARN, "linear": gguf.RopeScalingType.LINEAR}.items():
    found = config_of(name, kind)
    scaling = {"rope_type": name, "factor": 4.0, "rope_theta": 10000.0}
    scaling |= {"original_max_position_embeddings": 64} if name == "yarn" else {}
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 256}
    stated = LlamaConfig(**sizes, rope_parameters=scaling)
    frequencies, wanted = (LlamaRotaryEmbedding(config).inv_freq for config in (found, stated))
    print(f"{name}: rope_parameters of the GGUF file {found.rope_parameters}; frequencies {frequencies.tolist()[:4]}, of a config {wanted.tolist()[:4]}")
    assert found.rope_parameters["rope_type"] == "default", "the behaviour has changed"
    assert torch.equal(frequencies, plain), "the behaviour has changed"
    assert not torch.allclose(wanted, plain), "the behaviour has changed"
PY
