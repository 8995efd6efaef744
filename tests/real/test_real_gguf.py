"""Real GGUF files: their headers, and texts of jspec beside those that transformers makes of the same file and of the folder
that was made of it.

A folder's weights are those of its file, rounded once more to bfloat16; Qwen's folders have the file's output head for their
embedding, too. So texts are compared with those of transformers with the file's own numbers, and with the folder only the
distributions are."""

import numpy as np
import pytest
from real_models import (
    QWEN,
    QWEN_LARGE,
    SMALL,
    TOKENS,
    divergence,
    gguf_file,
    read,
    reference,
    reference_model,
    written,
)

import jspec
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.gguf.architectures import read_architecture
from jspec.checkpoints.gguf.generation import generation_fields
from jspec.checkpoints.gguf.header import read_header

gguf = pytest.importorskip("gguf")

QWEN_ENDS = {"bos_token_id": 151643, "pad_token_id": 151643, "eos_token_id": [151645, 151643]}
ENDS = {
    QWEN: QWEN_ENDS,
    QWEN_LARGE: QWEN_ENDS,
    "smollm2-135m-instruct": {"bos_token_id": 1, "pad_token_id": 2, "eos_token_id": [2, 0]},
    "gemma-3-270m": {"bos_token_id": 2, "pad_token_id": 0, "eos_token_id": [1]},
}
# Of the published models: layers, hidden size, MLP, heads, KV heads, size of a head; vocabulary, context; theta; parameters.
# The heads of Qwen's count twice, because these files have them apart from the embeddings.
PUBLISHED = {
    "smollm2-135m-instruct": ((30, 576, 1536, 9, 3, 64), (49152, 8192), 1e5, 134_515_008),
    QWEN: ((24, 896, 4864, 14, 2, 64), (151936, 32768), 1e6, 494_032_768 + 151936 * 896),
    QWEN_LARGE: ((28, 1536, 8960, 12, 2, 128), (151936, 32768), 1e6, 1_543_714_304 + 151936 * 1536),
    "gemma-3-270m": ((18, 640, 2048, 4, 1, 256), (262144, 32768), 1e6, 268_098_176),
}
NAMES_OF_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
NAMES_OF_PARTS |= {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}
NAMES_OF_PARTS |= {f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"}
NAMES_OF_PARTS |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
NAMES_IN_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Nats a token by which a folder's distributions are apart from those of its file, half as much again as was measured.
APART = {"smollm2-135m-instruct": 7.1e-5, "gemma-3-270m": 1.06e-4, QWEN: 6.6e-4}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes(name):
    path = gguf_file(name)
    _, sources = read_architecture(read_header(path))
    config, (sizes, lengths, theta, parameters) = Checkpoint.open(path).target_config, PUBLISHED[name]
    found = config.num_layers, config.hidden_size, config.intermediate_size
    assert (*found, config.num_heads, config.num_kv_heads, config.head_dim) == sizes
    assert (config.vocab_size, config.max_position, config.rope.theta) == (*lengths, theta)
    assert config.num_parameters == sum(int(np.prod(source.shape)) for source in sources.values()) == parameters
    assert config.tie_embeddings == (not name.startswith("qwen"))
    assert config.rms_norm_eps == (1e-5 if name.startswith("smollm2") else 1e-6)
    if name.startswith("gemma"):
        assert (config.attention_scale, config.windows) == (1 / 16, ((512,) * 5 + (None,)) * 3)
        assert {rope.theta for rope in config.layer_ropes} == {1e4, 1e6}


@pytest.mark.parametrize("name", ENDS)
def test_end_tokens(name):
    assert generation_fields(read_header(gguf_file(name)))[0] == ENDS[name]


@pytest.mark.parametrize("name", SMALL)
def test_texts_and_logits(load, name):
    path, expected = gguf_file(name), reference(name)
    llm = load(path)
    logits = [np.asarray(llm.logits(tokens)) for tokens in expected.passages]
    results = llm.generate(expected.prompts, jspec.SamplingParams(temperature=0.0, max_tokens=TOKENS))
    model = reference_of(name)
    for ours, tokens in zip(logits, expected.passages, strict=True):
        theirs = read(model, tokens)
        assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()
    assert [result.token_ids for result in results] == written(model, expected.prompts, TOKENS)
    assert 0 < divergence(expected.logits, logits) <= APART[name]


def reference_of(name: str):
    """transformers' model of the folder, with the numbers of the GGUF file as the package gguf dequantises them."""
    import torch

    model = reference_model(name)
    model.generation_config.eos_token_id = ENDS[name]["eos_token_id"]
    state, heads = model.state_dict(), model.config.num_attention_heads
    kv_heads = model.config.num_key_value_heads
    for tensor in gguf.GGUFReader(gguf_file(name), "r").tensors:
        array = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        base, kind = tensor.name.rpartition(".")[::2]
        if name.startswith("smollm2") and base.endswith(
            ("attn_q", "attn_k")
        ):  # halves of rotated pairs lie side by side
            split = array.reshape(heads if base.endswith("q") else kv_heads, -1, 2, array.shape[-1])
            array = split.swapaxes(1, 2).reshape(array.shape)
        if name.startswith("gemma") and "norm" in base:  # the file has the factors themselves
            array = array - 1
        if base == "output":  # which the folder ties to the embedding
            model.lm_head.weight = torch.nn.Parameter(torch.from_numpy(array), requires_grad=False)
        else:
            state[f"{called(base, name)}.{kind}"].copy_(torch.from_numpy(array))
    return model


def called(base: str, name: str) -> str:
    """What transformers calls a tensor of a GGUF file, without its ending."""
    if base in ("token_embd", "output_norm"):
        return {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[base]
    _, layer, part = base.split(".")
    names = NAMES_OF_PARTS | (NAMES_IN_GEMMA if name.startswith("gemma") else {})
    return f"model.layers.{layer}.{names[part]}"
