"""Checkpoints of gpt-oss whose experts are stored in MXFP4: what they are read as, and what they compute."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import tiny_checkpoint, tiny_config

from convert import convert, load_folder
from convert.verify import jspec_logits, transformers_logits
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.huggingface.config import read_config
from jspec.checkpoints.tensors.stacked_experts import repacked
from jspec.models.params import abstract_params, build
from jspec.quantization import unpack_pairs
from jspec.quantization.mxfp4_pairs import factors

GPT_OSS = "GptOssForCausalLM"
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
SIZES = {"hidden_size": 96, "intermediate_size": 64, "head_dim": 16}  # three groups, and two


@pytest.fixture
def checkpoint(tmp_path):
    return tiny_checkpoint(tmp_path / "four_bits", GPT_OSS, dtype="bfloat16", quantization_config=MXFP4, **SIZES)


def in_bfloat16(blocks, scales) -> np.ndarray:
    """Experts in bfloat16, ``[X, in, out]``, as transformers unpacks them."""
    torch = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    unpacked = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    return unpacked.contiguous().view(torch.uint16).numpy().view(jnp.bfloat16)


def every_code_with_every_scale() -> tuple[np.ndarray, np.ndarray]:
    """Blocks ``[1, 129, 3, 16]`` whose bytes are all there are, and scales ``[1, 129, 3]``."""
    rng = np.random.default_rng(0)
    blocks = np.stack([rng.permutation(256) for _ in range(129)])[:, :48].astype(np.uint8).reshape(1, 129, 3, 16)
    # From 1 on: bfloat16 cannot hold what scale 0 stands for.
    return blocks, np.repeat(np.arange(129, dtype=np.uint8).clip(1)[None, :, None], 3, axis=2)


def test_every_number_is_that_of_transformers():
    blocks, scales = every_code_with_every_scale()
    wanted = in_bfloat16(blocks, scales)[0].T
    padded = np.pad(scales[0], ((0, 0), (0, 1))).astype(np.uint32)
    weight, scale = repacked(blocks[0]).swapaxes(0, 1), factors(padded[:, 0::2], padded[:, 1::2]).T
    found = unpack_pairs.dequantize(jnp.asarray(weight), jnp.asarray(scale), 96)
    normal = np.abs(wanted.astype(np.float64)) >= 2.0**-126
    assert normal.sum() > 0.8 * normal.size
    np.testing.assert_array_equal(np.asarray(found)[normal], wanted[normal])


def test_logits_are_those_of_the_experts_in_bfloat16(checkpoint, tmp_path):
    """transformers reads the same weights in bfloat16, and jspec both."""
    pytest.importorskip("torch")
    tensors = load_file(checkpoint / "model.safetensors")
    wide = {name: array for name, array in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    for name in tensors:
        if name.endswith("_blocks"):
            start = name.removesuffix("_blocks")
            wide[start] = in_bfloat16(tensors[name], tensors[f"{start}_scales"])
    (folder := tmp_path / "wide").mkdir()
    save_file(wide, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(tiny_config(GPT_OSS, model_type="gpt_oss", **SIZES)))

    tokens = np.random.default_rng(1).integers(97, size=40)
    [wanted] = transformers_logits(folder, [tokens])
    for one in (folder, checkpoint):
        config, params = load_folder(one, "float32")
        [found] = jspec_logits(build(config, jax.device_put(params)), [tokens])
        assert np.abs(found - wanted).max() / np.abs(wanted).max() < 2e-5


def test_four_bits_stay_four_bits(checkpoint):
    config, params = load_folder(checkpoint)
    assert config.experts is not None
    assert config.experts.stored == "mxfp4"
    assert {name: array.shape for name, array in params.items()} == config.param_shapes()
    assert params["layers.0.mlp.gate_up.weight"].shape == (2, 3 * 2 * 64, 32)  # a pair and a half of groups, padded
    assert params["layers.1.mlp.down.weight"].dtype == np.uint8
    assert params["layers.1.mlp.down.scale"].dtype == np.uint32
    assert params["layers.0.attention.qkv.weight"].dtype == jnp.bfloat16
    assert config.weight_bytes(2) == sum(array.nbytes for array in params.values())
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in abstract_params(config, "bfloat16").items()} == {
        name: (array.shape, array.dtype) for name, array in params.items()
    }


def test_a_converted_folder_holds_the_same(checkpoint, tmp_path):
    report = convert(checkpoint, tmp_path / "out", verify="shapes")
    assert "the experts stay in MXFP4, four bits a weight" in report.notes
    wanted_config, wanted = load_folder(checkpoint)
    config, params = load_folder(tmp_path / "out")
    assert config == wanted_config
    assert params.keys() == wanted.keys()
    assert all(np.array_equal(params[name], wanted[name]) for name in params)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_the_other_linear_maps_may_be_quantised(checkpoint, tmp_path, kind):
    convert(checkpoint, tmp_path / "out", quantize=kind, verify="shapes")
    config, params = load_folder(tmp_path / "out")
    _, original = load_folder(checkpoint)
    assert config.quantization == kind
    assert params["layers.0.attention.qkv.weight"].dtype.itemsize == 1
    for name in ("layers.0.mlp.gate_up.weight", "layers.0.mlp.gate_up.scale"):
        np.testing.assert_array_equal(params[name], original[name])


def test_experts_that_are_not_in_codes_may_be_quantised(tmp_path):
    tiny_checkpoint(tmp_path / "plain", GPT_OSS)
    convert(tmp_path / "plain", tmp_path / "out", quantize="int8", verify="shapes")
    _, params = load_folder(tmp_path / "out")
    assert params["layers.0.mlp.gate_up.weight"].dtype == np.int8


def rewritten(checkpoint, change):
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return checkpoint


BLOCKS, SCALES = (f"model.layers.1.mlp.experts.down_proj_{part}" for part in ("blocks", "scales"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(SCALES), rf"tensor '{SCALES}' is missing"),
        (
            lambda t: t.update({SCALES: t[SCALES][:, :, :1]}),
            r"is uint8 \[3, 96, 1\], but .* asks for uint8 \[3, 96, 2\]",
        ),
        (lambda t: t.update({BLOCKS: t[BLOCKS].astype(np.float32)}), r"is float32 \[.*asks for uint8"),
        (lambda t: t[SCALES].fill(255), "has a scale of 255: expected at most 128, .*255 is no number in MXFP4"),
        (lambda t: t[SCALES].fill(129), "has a scale of 129: expected at most 128, for weights up to 12"),
    ],
    ids=["missing", "shape", "dtype", "nan", "large"],
)
def test_damaged_tensors_are_refused(checkpoint, change, message):
    with pytest.raises(Refusal, match=message):
        load_folder(rewritten(checkpoint, change))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"intermediate_size": 80}, "experts.width=80: expected a multiple of 32"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha=1.5: expected 1.702"),
        ({"swiglu_limit": -1.0}, "swiglu_limit"),
        ({"num_experts_per_tok": 4}, "num_experts_per_tok=4"),
        ({"quantization_config": {"quant_method": "hqq"}}, "hqq"),
        ({"architectures": ["LlamaForCausalLM"]}, "mxfp4"),
    ],
    ids=str,
)
def test_malformed_configs_are_refused(tmp_path, keys, message):
    config = tiny_config(GPT_OSS, quantization_config=MXFP4, **SIZES) | keys
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refusal, match=message):
        read_config(Folder(tmp_path))


def test_plain_experts_that_are_said_to_be_in_codes(tmp_path):
    """transformers writes such a folder when it is asked to dequantise one that was not quantised, and reads it. One with
    some experts in codes is refused."""
    transformers = pytest.importorskip("transformers")
    plain = tiny_checkpoint(tmp_path / "plain", GPT_OSS, dtype="float32", model_type="gpt_oss", **SIZES)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    model.save_pretrained(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    found, params = load_folder(tmp_path / "out", "float32")
    assert found == Checkpoint.open(tmp_path / "out").target_config == load_folder(plain)[0]
    wanted = load_folder(plain, "float32")[1]
    for name, array in params.items():
        np.testing.assert_allclose(array, wanted[name], rtol=2**-8, atol=0)
    assert any(
        "the experts are not quantised, although" in note for note in convert(tmp_path / "out", tmp_path / "to").notes
    )
    first = "model.layers.0.mlp.experts.down_proj"
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors[f"{first}_blocks"] = tensors.pop(first)
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    words = (
        r"gate_up_proj' is \w+, but quantization_config of config\.json says .* MXFP4; remove quantization_config if"
    )
    with pytest.raises(Refusal, match=words):
        load_folder(tmp_path / "out")


def test_the_files_of_a_checkpoint_in_codes_are_named(checkpoint):
    source = Checkpoint.open(checkpoint).hugging_face
    assert source.missing == source.unused == []
    assert source.exact_dtype == "bfloat16"
