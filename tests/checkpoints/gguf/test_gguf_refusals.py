"""GGUF files that are not read, or not as they are, are refused in one sentence that names the key or the tensor."""

import numpy as np
import pytest
from gguf_models import MODELS, other, under

from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.gguf.architectures import read_architecture
from jspec.checkpoints.gguf.header import read_header

pytest.importorskip("gguf")
pytest.importorskip("torch")
pytest.importorskip("transformers")


OF_EVERY_MODEL = "block_count context_length embedding_length attention.head_count attention.layer_norm_rms_epsilon"
NEEDED = {
    "llama": f"{OF_EVERY_MODEL} feed_forward_length",
    "qwen3-moe": "expert_count expert_used_count expert_feed_forward_length",
    "gemma4-experts": "attention.sliding_window attention.key_length_swa attention.sliding_window_pattern expert_used_count",
    "gpt-oss": "attention.sliding_window expert_count rope.scaling.factor rope.scaling.original_context_length",
    "qwen3.5": "feed_forward_length ssm.conv_kernel ssm.state_size ssm.group_count ssm.time_step_rank ssm.inner_size",
    "qwen3.5-moe": "expert_shared_feed_forward_length expert_feed_forward_length",
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in NEEDED.items() for key in keys.split()])
def test_a_missing_key_is_named(header, name, key):
    plain = header(name)
    full = f"{plain.metadata['general.architecture']}.{key}"
    with pytest.raises(Refusal, match=f"model.gguf: {full}(=None| is missing): expected "):
        read_architecture(other(plain, {full: ...}))


@pytest.mark.parametrize("name", MODELS)
def test_a_missing_tensor_is_named(header, name):
    """One after the other, but for those that say by their presence what a model has."""
    plain = header(name)
    said = ("output.weight", "rope_freqs.weight", ".attn_q.bias", ".ffn_gate.bias", "ffn_gate_up_exps.weight")
    kinds = read_architecture(plain)[0].get("layer_types", []) if name.startswith("gemma4") else []
    full = [f"blk.{layer}.attn_v.weight" for layer, kind in enumerate(kinds) if kind == "full_attention"]
    for tensor in plain.tensors:
        if not tensor.name.endswith(said) and tensor.name not in full:
            with pytest.raises(Refusal, match=f"lacks the tensor '{tensor.name}'"):
                read_architecture(other(plain, drop=[tensor.name]))


@pytest.mark.parametrize("name", MODELS)
def test_a_tensor_of_another_shape_is_named(header, name):
    plain = header(name)
    for tensor in plain.tensors:
        if tensor.name not in ("rope_freqs.weight", "token_embd.weight", "per_layer_token_embd.weight"):
            shapes = {tensor.name: (*tensor.shape[:-1], tensor.shape[-1] + 1)}
            with pytest.raises(Refusal, match=rf"'{tensor.name}' has shape \[.*\], but .* ask for \["):
                read_architecture(other(plain, shapes=shapes))


@pytest.mark.parametrize("name", MODELS)
def test_a_tensor_without_a_place_is_named(header, name):
    with pytest.raises(
        Refusal, match=r"holds the tensor 'blk\.0\.attn_q\.scale', which has no place in \w+ForCausalLM"
    ):
        read_architecture(other(header(name), add=[("blk.0.attn_q.scale", (1,))]))


ENCODER = r"holds an encoder of images or sounds alone \(mmproj\); give the file of the language model"
NOT_YET = (
    r"expected one of llama, qwen2, .* \(this one is not read from GGUF for now\); give the folder of the original"
)
REFUSED = [
    ("general.type", "adapter", "is a LoRA adapter; merge it into its base model"),
    ("general.type", "mmproj", ENCODER),
    ("general.architecture", "clip", ENCODER),
    ("general.type", "imatrix", "general.type='imatrix': expected 'model'"),
    ("general.architecture", "glm4moe", f"'glm4moe': {NOT_YET}"),
    ("general.architecture", "qwen3next", f"'qwen3next': {NOT_YET}"),
    (
        "general.architecture",
        "falcon",
        "general.architecture='falcon': expected one of llama, .*, qwen35moe; give the",
    ),
    ("general.architecture", ..., "general.architecture is missing: expected a string"),
    ("llama.attention.causal", False, "llama.attention.causal=False: expected true"),
    ("llama.attention.value_length", 8, "llama.attention.value_length=8: expected 16, as keys and values"),
    (
        "llama.rope.dimension_count",
        8,
        "partial_rotary_factor=0.5: expected 1, because this architecture rotates whole",
    ),
    (
        "llama.rope.scaling.type",
        "longrope",
        "llama.rope.scaling.type='longrope': expected 'none', 'linear' or 'yarn'",
    ),
    ("llama.expert_count", 8, "llama.expert_count=8: expected 0, because the experts of Mixtral"),
    ("llama.block_count", 4, r"lacks the tensor 'blk\.3\."),
    ("llama.block_count", 2, r"holds the tensor 'blk\.2\..* no place in LlamaForCausalLM"),
    (
        "llama.embedding_length",
        60,
        r"'token_embd.weight' has shape \[97, 64\], but the sizes in .* ask for \[97, 60\]",
    ),
    ("llama.attention.head_count", True, "llama.attention.head_count=True: expected an integer"),
    ("llama.attention.head_count_kv", 3, "num_key_value_heads=3: expected a divisor of num_attention_heads, 4"),
    ("llama.attention.layer_norm_rms_epsilon", 0.0, "layer_norm_rms_epsilon=0.0: expected a positive number"),
    ("tokenizer.ggml.bos_token_id", 97, "bos_token_id=97: expected an integer in 0..96"),
    ("llama.feed_forward_length", 2**31 - 1, "tensor .* ask for"),
    ("gemma4.rope.dimension_count", 16, "gemma4.rope.dimension_count=16: expected 32, as this architecture rotates"),
    ("gemma4.rope.dimension_count_swa", 8, "gemma4.rope.dimension_count_swa=8: expected 16, as this architecture"),
    ("gemma4.attention.value_length_swa", 8, "gemma4.attention.value_length_swa=8: expected 16, as keys and values"),
    ("gemma4.rope.scaling.factor", 2.0, "gemma4.rope.scaling.type=None: expected 'none' and no factor"),
    (
        "gemma4.attention.sliding_window_pattern",
        np.ones(3, bool),
        "gemma4.attention.sliding_window_pattern=.* of 4 flags, true",
    ),
    ("qwen35.ssm.v_head_reordered", False, "qwen35.ssm.v_head_reordered=False: expected true, as llama.cpp has"),
    ("qwen35.nextn_predict_layers", 2, r"qwen35.nextn_predict_layers=2: expected an integer in 0\.\.1"),
    ("qwen3moe.expert_count", 1025, r"qwen3moe.expert_count=1025: expected an integer in 1\.\.1024"),
]
OF_ARCHITECTURE = {"gemma4": "gemma4", "qwen35": "qwen3.5", "qwen3moe": "qwen3-moe"}


@pytest.mark.parametrize(("key", "value", "words"), REFUSED)
def test_a_file_that_is_not_read_is_refused(header, key, value, words):
    plain = header(OF_ARCHITECTURE.get(key.partition(".")[0], "llama"))
    with pytest.raises(Refusal, match=f"model.gguf: .*{words}"):
        read_architecture(other(plain, {key: value}))


def test_a_vocabulary_without_weights_is_refused(header):
    with pytest.raises(Refusal, match="holds a vocabulary without weights; give the file of the language model"):
        read_architecture(header("llama")._replace(tensors=()))


WRONG = (
    -1,
    0,
    1 << 40,
    1.5,
    float("nan"),
    True,
    "x",
    [],
    ["x"],
    np.zeros(0, np.int32),
    np.array([1, 2]),
    np.ones(5, bool),
)


@pytest.mark.parametrize(
    "name", ["llama-llama3", "gemma3", "gemma4-experts", "gemma4-shared-caches", "gpt-oss", "qwen3.5-moe"]
)
def test_metadata_of_any_type_are_read_or_refused(header, name):
    """Each key in turn has values of other types, and those that models may also have."""
    plain, refused = header(name), []
    architecture = plain.metadata["general.architecture"]
    more = (
        "rope.scaling.type",
        "rope.scaling.factor",
        "attention.sliding_window_pattern",
        "attention.recurrent_layers",
    )
    keys = (*plain.metadata, *under(architecture, dict.fromkeys(more)), "general.type")
    for key in keys:
        for value in WRONG:
            try:
                read_architecture(other(plain, {key: value}))
            except Refusal as refusal:
                refused.append(str(refusal))
    assert len(refused) > 8 * len(plain.metadata)
    assert all("model.gguf: " in words for words in refused)


def test_sizes_beyond_any_model_are_refused(header):
    """Before anything as large is made."""
    sizes = {"block_count": 4096, "feed_forward_length": 2**31 - 1}
    with pytest.raises(Refusal, match=r"model.gguf: its sizes multiply to [0-9]+ parameters, beyond any model"):
        read_architecture(other(header("llama"), under("llama", sizes)))
    with pytest.raises(Refusal, match=r"qwen3moe.expert_count=128: expected an integer in 1\.\.32"):
        read_architecture(other(header("qwen3-moe"), under("qwen3moe", {"block_count": 4096, "expert_count": 128})))


def test_sizes_that_fit_no_model_are_refused(header):
    """By the checks of the config, whose message gets the name of the file."""
    odd = dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), 15)
    with pytest.raises(Refusal, match=r"model.gguf: head_dim=15: expected an even number"):
        read_architecture(other(header("llama"), under("llama", odd)))


@pytest.mark.parametrize(("kind", "tensor"), [(2, "blk.0.ffn_down_exps.weight"), (39, "blk.1.ffn_up_exps.weight")])
def test_experts_of_gpt_oss_in_other_types_are_refused(header, kind, tensor):
    with pytest.raises(Refusal, match=rf"{tensor}' has the type {kind} of ggml: expected one of \[0, 1, 30\], as all "):
        read_architecture(other(header("gpt-oss"), types={tensor: kind}))


@pytest.mark.parametrize("name", ["llama-llama3", "gemma4"])
def test_wrong_factors_of_a_rope_are_refused(saved, header, tmp_path, name):
    plain = header(name)
    for change in ({"types": {"rope_freqs.weight": 1}}, {"shapes": {"rope_freqs.weight": (8,)}}):
        with pytest.raises(Refusal, match=r"'rope_freqs.weight' has the type . of .*: expected F32, 0, and \[16\]"):
            read_architecture(other(plain, **change))
    ends = [t._replace(start=plain.size) if t.name == "rope_freqs.weight" else t for t in plain.tensors]
    with pytest.raises(Refusal, match=r"model.gguf: is damaged \(.*\); download it again"):
        read_architecture(plain._replace(tensors=tuple(ends)))
    [at] = [tensor.start for tensor in plain.tensors if tensor.name == "rope_freqs.weight"]
    damaged = tmp_path / "model.gguf"
    for number in (np.nan, -1.0, *([2.0] if name == "gemma4" else [])):
        data = bytearray((saved(name) / "model.gguf").read_bytes())
        data[at : at + 4] = np.float32(number).tobytes()
        damaged.write_bytes(data)
        with pytest.raises(
            Refusal, match=r"'rope_freqs.weight' holds (.*: expected positive numbers|other numbers than 1)"
        ):
            read_architecture(read_header(damaged))
