"""Checkpoints whose weights are FP8 already: read as they are stored, converted as they are stored, or refused by name."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_heads
from fp8_checkpoints import FP8, LINEAR, compressed_tensors, fp8_checkpoint, vllm_fp8
from safetensors import safe_open
from tiny import ARCHITECTURES, tiny_checkpoint, tiny_config, write_weights

from convert import Refusal, convert, load_draft, load_folder
from convert.cli import main
from convert.verify import compare, jspec_logits
from jspec.checkpoints.checkpoint import Checkpoint, read_draft_config
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.huggingface.config import read_config
from jspec.checkpoints.huggingface.quantization_config import READERS
from jspec.models.params import abstract_params, build

GPT_OSS = "GptOssForCausalLM"  # its experts are stacked in one tensor
DOWN = "model.layers.1.mlp.down_proj"
Q = "model.layers.0.self_attn.q_proj"
KINDS = {
    "channel": compressed_tensors(),
    "tensor": compressed_tensors("tensor"),
    "fp8": vllm_fp8(),
}


def names_in(folder) -> list[str]:
    """Names of the tensors in model.safetensors."""
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        return list(file.keys())


def changed(folder, **changes):
    """Put other tensors into a checkpoint, or leave out those that are None; ``__`` stands for a dot in a name."""
    stored = {name: _raw(folder, name) for name in names_in(folder)}
    stored |= {name.replace("__", "."): array for name, array in changes.items()}
    write_weights(folder, {name: array for name, array in stored.items() if array is not None})
    return folder


def _raw(folder, name) -> np.ndarray:
    """A tensor of model.safetensors, read without jspec, because safetensors reads no FP8 for NumPy."""
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + length])[name]
    kinds = {"F8_E4M3": FP8, "BF16": ml_dtypes.bfloat16, "F32": np.float32}
    start, stop = (8 + length + offset for offset in entry["data_offsets"])
    return np.frombuffer(data[start:stop], kinds[entry["dtype"]]).reshape(entry["shape"])


def logits(folder) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    config, params = load_folder(folder, "float32")
    module = build(config, {name: jnp.asarray(array) for name, array in params.items()})
    return jspec_logits(module, [rng.integers(97, size=length) for length in (5, 33)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", [one for one in ARCHITECTURES if one != GPT_OSS])
def test_logits_are_those_of_dequantised_weights(tmp_path, architecture, kind):
    src = fp8_checkpoint(tmp_path / "src", architecture, quantization=KINDS[kind])
    config, params = load_folder(src)
    assert (config.quantization, config.quantized_head) == ("fp8", False)
    assert config == Checkpoint.open(src).target_config == read_draft_config(src)
    assert {n: (a.shape, a.dtype) for n, a in params.items()} == {
        n: (leaf.shape, leaf.dtype) for n, leaf in abstract_params(config, "bfloat16").items()
    }
    assert compare(logits(tmp_path / "src-wide"), logits(src)).exact


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_the_files(tmp_path, kind):
    src = fp8_checkpoint(tmp_path / "src", quantization=KINDS[kind], scale_dtype=np.float32)
    _, params = load_folder(src)
    parts = [_raw(src, f"model.layers.0.self_attn.{part}_proj.weight") for part in "qkv"]
    scales = [_raw(src, f"model.layers.0.self_attn.{part}_proj.weight_scale").reshape(-1) for part in "qkv"]
    weight, scale = params["layers.0.attention.qkv.weight"], params["layers.0.attention.qkv.scale"]
    np.testing.assert_array_equal(weight.view(np.uint8), np.concatenate(parts).view(np.uint8))
    expected = [np.broadcast_to(one, len(part)) for one, part in zip(scales, parts, strict=True)]
    np.testing.assert_array_equal(scale, np.concatenate(expected))
    assert len(set(scale.tolist())) == (128 if kind == "channel" else 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Phi3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_conversion_keeps_every_bit(tmp_path, kind, architecture):
    src, out = fp8_checkpoint(tmp_path / "src", architecture, quantization=KINDS[kind], shards=2), tmp_path / "out"
    report = convert(src, out, verify="shapes")
    assert (report.dtype, report.quantization) == ("bfloat16", "fp8")
    assert any("params are the source's, as they are stored" in note for note in report.notes)
    (config, params), (again, kept) = load_folder(src), load_folder(out)
    assert (config, list(params)) == (again, list(kept))
    for name, array in params.items():
        assert array.dtype == kept[name].dtype
        np.testing.assert_array_equal(array.view(np.uint8), kept[name].view(np.uint8))
    assert report.parameters == config.num_parameters
    assert load_folder(out, "float32")[1]["norm.weight"].dtype == np.float32


def test_an_output_head_may_be_quantised(tmp_path):
    src = fp8_checkpoint(tmp_path / "src", quantization=compressed_tensors(ignore=()), head=True)
    config, params = load_folder(src)
    assert config.quantized_head
    assert params["head.weight"].dtype == FP8
    assert compare(logits(tmp_path / "src-wide"), logits(src)).exact


@pytest.mark.parametrize("ignore", [(), ("lm_head",), ("re:.*lm_head",)])
def test_a_tied_output_head_is_not(tmp_path, ignore):
    src = fp8_checkpoint(tmp_path / "src", quantization=compressed_tensors(ignore=ignore), tie_word_embeddings=True)
    config, params = load_folder(src)
    assert not config.quantized_head
    assert params["embedding"].dtype == ml_dtypes.bfloat16
    assert compare(logits(tmp_path / "src-wide"), logits(src)).exact


def test_scales_of_activations_are_left_out(tmp_path, capsys):
    src = fp8_checkpoint(tmp_path / "src", quantization=compressed_tensors("tensor", kv_cache_scheme={"num_bits": 8}))
    attention = "model__layers__0__self_attn"
    one = np.ones(1, np.float32)
    changed(
        src, **{f"{attention}__q_proj__input_scale": one, f"{attention}__k_scale": one, f"{attention}__v_scale": one}
    )
    assert main([str(src), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "note: 3 scales of activations or of the cache left out, because neither is quantised" in printed
    for name, end in (
        ("weight", "qkv.weight[64:96]  [32, 64]  float8_e4m3fn -> float8_e4m3fn"),
        ("weight_scale", "qkv.scale[64:96]  [32]  bfloat16 -> float32"),
    ):
        [line] = [line for line in printed.splitlines() if line.startswith(f"model.layers.0.self_attn.k_proj.{name} ")]
        assert line.endswith(end)
    assert printed.splitlines()[-1].startswith("35 tensors -> 15 params and 8 scales, 74,176 parameters, bfloat16")
    assert compare(logits(tmp_path / "src-wide"), logits(src)).exact


@pytest.mark.parametrize(
    "ignore",
    [
        ["lm_head", "re:.*mlp.gate$"],
        ["re:.*lm_head", "model.layers.1.mlp.gate"],
        ["lm_head", r"re:^.*\.mlp\.(gate|shared_expert_gate)$", "re:visual.*", "re:.*layers\\.[0-9]+\\.mlp\\.gate$"],
    ],
)
def test_routers_may_be_ignored(tmp_path, ignore):
    src = fp8_checkpoint(tmp_path / "src", "Qwen3MoeForCausalLM", quantization=compressed_tensors(ignore=ignore))
    assert load_folder(src)[1]["layers.1.mlp.router.weight"].dtype == ml_dtypes.bfloat16


def test_the_text_model_of_a_multimodal_one(tmp_path):
    """Its modules have other names there, by which ``ignore`` may mean them."""
    text = {**tiny_config("Gemma3ForCausalLM"), "architectures": None}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    for ignore, words in (
        (["language_model.lm_head", "re:vision_tower.*"], None),
        (["re:.*lm_head", "re:language_model.model.layers.0.*"], "self_attn.q_proj, "),
        (["model.language_model.layers.1.mlp.up_proj"], "leave model.layers.1.mlp.up_proj as they were"),
    ):
        quantization = compressed_tensors(ignore=ignore)
        (tmp_path / "config.json").write_text(json.dumps({**outer, "quantization_config": quantization}))
        if words is None:
            assert read_config(Folder(tmp_path)).quantization == "fp8"
            continue
        with pytest.raises(Refusal, match=words):
            read_config(Folder(tmp_path))


def test_the_weights_of_a_multimodal_one(tmp_path):
    src = fp8_checkpoint(tmp_path / "src", "Gemma3ForCausalLM")
    tensors = {f"language_model.{name}": _raw(src, name) for name in names_in(src)}
    vision = {
        "vision_tower.fc1.weight": np.ones((3, 3), FP8),
        "vision_tower.fc1.weight_scale": np.ones((3, 1), np.float32),
    }
    write_weights(src, {**tensors, **vision})
    text = json.loads((src / "config.json").read_text())
    outer = {"quantization_config": text.pop("quantization_config"), "text_config": {**text, "architectures": None}}
    outer["architectures"] = ["Gemma3ForConditionalGeneration"]
    (src / "config.json").write_text(json.dumps(outer))
    assert compare(logits(tmp_path / "src-wide"), logits(src)).exact
    notes = convert(src, tmp_path / "out").notes
    assert "2 tensors of other parts than the text model were left out" in notes
    assert "the fp8 weights and their scales are kept as they are stored" in notes


def test_a_draft_model(tmp_path):
    """A PARD model, of which jspec stores the config in the manifest."""
    src = fp8_checkpoint(tmp_path / "src", pard_token=tiny_heads.MASK)
    convert(src, tmp_path / "out", verify="shapes")
    (config, params), (again, kept) = load_draft(src), load_draft(tmp_path / "out")
    assert config == again
    assert (config.decoder.quantization, config.decoder.quantized_head) == ("fp8", False)
    assert params.keys() == kept.keys()


@pytest.mark.parametrize("quantize", ["int8", "fp8"])
@pytest.mark.parametrize("more", [["--dry-run"], []])
def test_it_is_not_quantised_again(tmp_path, capsys, quantize, more):
    src = fp8_checkpoint(tmp_path / "src")
    assert main([str(src), str(tmp_path / "out"), "--quantize", quantize, *more]) == 2
    words = f"quantize='{quantize}': expected None, because its weights are fp8 already (quantization_config)"
    assert words in capsys.readouterr().err


def test_transformers_computes_something_else(tmp_path):
    with pytest.raises(
        Refusal, match="which rounds activations to eight bits where it reads quantised weights; ask for"
    ):
        convert(fp8_checkpoint(tmp_path / "src"), tmp_path / "out", verify="logits")


@pytest.mark.parametrize(
    "more", [{}, {"weight_block_size": None}, {"fmt": "e4m3", "modules_to_not_convert": ["lm_head"]}]
)
def test_other_spellings_of_fp8_are_read(tmp_path, more):
    src = fp8_checkpoint(tmp_path / "src", quantization=vllm_fp8(**more))
    assert not Checkpoint.open(src).target_config.quantized_head


def test_the_former_key(tmp_path):
    quantization = compressed_tensors()
    src = fp8_checkpoint(tmp_path / "src", quantization=quantization)
    config = json.loads((src / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (src / "config.json").write_text(json.dumps(config))
    assert Checkpoint.open(src).target_config.quantization == "fp8"


UNREAD = ["bitsandbytes", "mxfp4", "torchao", "quark", "hqq", "eetq", "aqlm", "fbgemm_fp8", "gguf"]


@pytest.mark.parametrize("method", UNREAD)
def test_unsupported_methods_are_refused(tmp_path, refused, method):
    assert method not in READERS
    src = tiny_checkpoint(tmp_path / "src")
    config = {**tiny_config(), "quantization_config": {"quant_method": method, "bits": 4}}
    (src / "config.json").write_text(json.dumps(config))
    refused(
        src,
        f"src/config.json: quantization_config.quant_method='{method}' is not read",
        "use the original bfloat16 checkpoint, with jspec-convert --quantize int8 or fp8",
    )
    for load in (load_folder, load_draft, lambda src: Checkpoint.open(src).target_config):
        with pytest.raises(Refusal, match=f"quant_method='{method}' is not read"):
            load(src)


GROUP = compressed_tensors()["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        *(
            (compressed_tensors(format=name), f".format='{name}': expected 'float-quantized' or 'pack-quantized'; of ")
            for name in (
                "int-quantized",
                "nvfp4-pack-quantized",
                "naive-quantized",
                "mixed-precision",
            )
        ),
        (
            compressed_tensors(format=None),
            "quantization_config.format=None: expected 'float-quantized' or 'pack-quantized'",
        ),
        (
            compressed_tensors(group__format="int-quantized"),
            "group_0.format='int-quantized': expected 'float-quantized'",
        ),
        (compressed_tensors(weights__num_bits=4), "config_groups.group_0.weights.num_bits=4: expected 8; of quantised"),
        (compressed_tensors(weights__type="int"), "config_groups.group_0.weights.type='int': expected 'float'"),
        (compressed_tensors(weights__symmetric=False), "group_0.weights.symmetric=False: expected True"),
        (compressed_tensors(weights__dynamic=True), "group_0.weights.dynamic=True: expected False"),
        (compressed_tensors("block"), "group_0.weights.block_structure=None: expected two integers in 1..1048576, the"),
        (
            compressed_tensors("group"),
            "group_0.weights.strategy='group': expected 'channel' or 'tensor' or 'block'; of",
        ),
        (compressed_tensors(group__weights=None), "config_groups.group_0={'weights': None"),
        (compressed_tensors(config_groups={}), "quantization_config.config_groups={}: expected one group, of all"),
        (compressed_tensors(config_groups={"a": GROUP, "b": GROUP}), "expected one group, of all linear maps"),
        (compressed_tensors(config_groups=[1]), "quantization_config.config_groups=[1]: expected an object or null"),
        (compressed_tensors(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config={'format': 'sparse-24"),
        (compressed_tensors(transform_config={"config_groups": {"R1": {}}}), "neither sparse nor rotated weights are"),
        (
            {**compressed_tensors(), "ignore": "lm_head"},
            "quantization_config.ignore='lm_head': expected a list of module names",
        ),
        (compressed_tensors(ignore=[3]), "quantization_config.ignore=[3]: expected a list of module names"),
        (compressed_tensors(ignore=["re:a"] * 21), "expected at most 20 patterns; list the names of modules"),
        *(
            (
                compressed_tensors(ignore=[f"re:{pattern}"]),
                f"quantization_config.ignore has the pattern {pattern[:80]!r}",
            )
            for pattern in (
                "(a|b)+c",
                "(a|b)(a|b)(a|b)(a|b)",
                "(?!x).*",
                ".*.*.*.*",
                "((a))",
                "a{9}",
                "[b-a]",
                "a" * 101,
            )
        ),
        (
            compressed_tensors(ignore=["lm_head", DOWN]),
            f"quantization_config.ignore and targets leave {DOWN} as they were: expected none but the output head and",
        ),
        (
            compressed_tensors(ignore=["lm_head", "re:.*self_attn.*"]),
            "q_proj, model.layers.0.self_attn.k_proj, model.layers.0.self_attn.v_proj and 5 more as they were",
        ),
        (compressed_tensors(group__targets=["re:.*down_proj$"]), "q_proj, model.layers.0.self_attn.k_proj, "),
        (compressed_tensors(ignore=["Linear"]), "v_proj and 11 more as they were"),
        (vllm_fp8(["model.layers.0.mlp.up_proj"]), "ignored_layers and targets leave model.layers.0.mlp.up_proj as"),
        (vllm_fp8(fmt="e5m2"), "quantization_config.fmt='e5m2': expected 'e4m3'"),
        ({"bits": 4}, "quantization_config.quant_method='unnamed' is not read"),
        ({"load_in_4bit": True}, "quantization_config.quant_method='bitsandbytes' is not read"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_method='modelopt' (NVFP4) is not read"),
        ({"quant_method": 3}, "quantization_config.quant_method=3: expected a string"),
        ([1], "quantization_config=[1]: expected an object or null"),
    ],
)
def test_unsupported_configs_are_refused(tmp_path, quantization, words):
    (tmp_path / "config.json").write_text(json.dumps({**tiny_config(), "quantization_config": quantization}))
    with pytest.raises(Refusal) as refusal:
        read_config(Folder(tmp_path))
    assert words in str(refusal.value)
    assert str(refusal.value).startswith(f"{tmp_path}/config.json: quantization_config")


@pytest.mark.parametrize("kind", KINDS)
def test_experts_in_one_tensor_are_not_read(tmp_path, kind):
    config = {**tiny_config(GPT_OSS), "quantization_config": KINDS[kind]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        Refusal, match="are fp8, which is not read of GptOssForCausalLM, whose experts are in one tensor"
    ):
        read_config(Folder(tmp_path))


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4", "W4A16_AWQ"])
def test_checkpoints_of_model_optimizer(tmp_path, refused, algorithm):
    src = tiny_checkpoint(tmp_path / "src")
    described = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": None},
    }
    (src / "hf_quant_config.json").write_text(json.dumps(described))
    refused(
        src, f"src/hf_quant_config.json: quantization.quant_algo='{algorithm}', of NVIDIA Model Optimizer", "--quantize"
    )


def test_a_cache_of_model_optimizer_changes_no_weight(tmp_path):
    src = tiny_checkpoint(tmp_path / "src")
    described = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (src / "hf_quant_config.json").write_text(json.dumps(described))
    assert Checkpoint.open(src).target_config.quantization is None


@pytest.mark.parametrize("has_config", [False, True])
def test_a_folder_of_gguf(tmp_path, refused, has_config):
    src = tmp_path / "src"
    src.mkdir()
    (src / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    if has_config:
        (src / "config.json").write_text(json.dumps(tiny_config()))
    refused(
        src, "src/model-Q4_K_M.gguf: GGUF files, which are llama.cpp's, are not read", "config.json and safetensors"
    )


def test_a_gguf_file(tmp_path):
    src = tmp_path / "src"
    src.mkdir()
    (src / "model.GGUF").write_bytes(b"GGUF")
    assert main([str(src / "model.GGUF"), str(tmp_path / "out")]) == 2
    with pytest.raises(Refusal, match=r"model\.GGUF: GGUF files"):
        load_folder(src / "model.GGUF")


SCALE = f"{DOWN}.weight_scale".replace(".", "__")
WEIGHT = f"{DOWN}.weight".replace(".", "__")
COLUMN = np.ones((64, 1), np.float32)


def with_number(number: float) -> np.ndarray:
    scales = COLUMN.copy()
    scales[7] = number
    return scales


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("channel", {SCALE: None}, f"tensor '{DOWN}.weight_scale' is missing, and LlamaForCausalLM needs it"),
        (
            "channel",
            {SCALE: COLUMN[:63]},
            f"'{DOWN}.weight_scale' has shape [63, 1]: expected [64, 1], a scale for each",
        ),
        (
            "channel",
            {SCALE: COLUMN.reshape(1, 64)},
            "has shape [1, 64]: expected [64, 1], a scale for each output channel",
        ),
        ("channel", {SCALE: COLUMN[:1]}, "has shape [1, 1]: expected [64, 1], a scale for each output channel"),
        ("tensor", {SCALE: COLUMN}, "has shape [64, 1]: expected [1], a scale for each weight"),
        ("fp8", {SCALE: COLUMN[:2, 0]}, "has shape [2]: expected [1], a scale for each weight"),
        *(
            ("channel", {SCALE: with_number(number)}, f"'{DOWN}.weight_scale' holds {shown}: expected positive numbers")
            for number, shown in ((np.nan, "nan"), (np.inf, "inf"), (0, "0.0"), (-1, "-1.0"))
        ),
        ("tensor", {SCALE: np.zeros(1, np.float32)}, "holds 0.0: expected positive numbers"),
        (
            "channel",
            {SCALE: np.ones((64, 1), np.int32)},
            f"'{DOWN}.weight_scale' is stored as int32, but LlamaForCausalLM, quantised as quantization_config says, needs "
            "one of float32, bfloat16, float16",
        ),
        (
            "channel",
            {WEIGHT: np.ones((64, 96), ml_dtypes.bfloat16)},
            f"'{DOWN}.weight' is stored as bfloat16, but LlamaForCausalLM, quantised as quantization_config says, needs "
            "float8_e4m3fn",
        ),
        (
            "channel",
            {WEIGHT: np.ones((64, 96), np.float32), SCALE: None},
            "is stored as float32, but LlamaForCausalLM, ",
        ),
        ("channel", {WEIGHT: np.ones((64, 96), ml_dtypes.float8_e5m2)}, f"'{DOWN}.weight' is stored as F8_E5M2; only"),
        ("channel", {WEIGHT: np.ones((64, 95), FP8)}, f"'{DOWN}.weight' has shape [64, 95], but config.json asks for"),
        (
            "channel",
            {"lm_head__weight": np.ones((97, 64), FP8), "lm_head__weight_scale": np.ones((97, 1), np.float32)},
            "'lm_head.weight' is stored as float8_e4m3fn, but LlamaForCausalLM, quantised as quantization_config says, "
            "needs one of float32, bfloat16, float16",
        ),
        ("channel", {"lm_head__weight_scale": np.ones((97, 1), np.float32)}, "'lm_head.weight_scale' has no place in"),
        ("fp8", {f"{WEIGHT}_scale_inv": np.ones(1, np.float32)}, f"'{DOWN}.weight_scale_inv' holds scales of blocks"),
    ],
)
def test_damaged_checkpoints(tmp_path, capsys, kind, changes, words):
    src = fp8_checkpoint(tmp_path / "src", quantization=KINDS[kind])
    changed(src, **changes)
    with pytest.raises(Refusal) as refusal:
        load_folder(src)
    assert words in str(refusal.value)
    assert main([str(src), str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_dry_run_names_wrong_dtypes(tmp_path, capsys):
    src = changed(fp8_checkpoint(tmp_path / "src"), **{WEIGHT: np.ones((64, 96), np.float32)})
    assert main([str(src), "--dry-run"]) == 1
    assert f"wrong dtype: {DOWN}.weight float32, expected float8_e4m3fn" in capsys.readouterr().out


def test_quantised_weights_that_config_does_not_mention(tmp_path):
    src = fp8_checkpoint(tmp_path / "src")
    config = json.loads((src / "config.json").read_text())
    del config["quantization_config"]
    (src / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refusal, match=r"is stored as float8_e4m3fn, but LlamaForCausalLM needs one of float32"):
        load_folder(src)


@pytest.mark.parametrize(
    "make", [tiny_heads.eagle, tiny_heads.speculators, tiny_heads.mlp_speculator, tiny_heads.medusa]
)
@pytest.mark.parametrize("kind", KINDS)
def test_draft_heads_are_refused(tmp_path, make, kind):
    src = make(tmp_path / "head")
    config = json.loads((src / "config.json").read_text())
    (src / "config.json").write_text(json.dumps({**config, "quantization_config": KINDS[kind]}))
    with pytest.raises(
        Refusal, match=r"says that the weights of this draft head are quantised; .* its bfloat16 checkpoint"
    ):
        load_draft(src)


def test_helpers_know_which_maps_are_linear():
    """What these tests quantise is what jspec takes for linear maps."""
    assert LINEAR.search(f"{Q}.weight")
    assert not LINEAR.search("model.layers.0.mlp.gate.weight")


def test_a_deeply_nested_header_is_refused(tmp_path):
    """A key of the header that the format does not know, which would exhaust the parser."""
    src = fp8_checkpoint(tmp_path / "src")
    data = (src / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    deep = "[" * 99 + "]" * 99
    text = json.dumps({**header, f"{Q}.weight": {**header[f"{Q}.weight"], "x": 0}}).replace('"x": 0', f'"x": {deep}')
    (src / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode() + data[8 + length :])
    with pytest.raises(Refusal, match=r"model\.safetensors"):
        load_folder(src)
