"""Quantised checkpoints with gated delta nets: which maps stay in eight bits, and that they stand for what transformers
computes with the dequantised weights."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
from block_checkpoints import KEPT, Kind, stored_as
from fp8_checkpoints import FP8, changed, compressed_tensors, fp8_checkpoint, names_in, raw_tensor, vllm_fp8
from mtp_checkpoints import with_layers
from packed_weights import fp8, fp8_config
from safetensors.numpy import load_file
from stored_params import assert_same, assert_stands_for
from tiny import tiny_checkpoint, write_weights

from convert import convert, load_draft, load_folder
from convert.verify import jspec_logits, transformers_logits
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.config.model_fields import PLAIN_HEAD
from jspec.models.params import build
from jspec.models.quantization import quantize
from jspec.quantization.formats import known_format

DENSE, EXPERTS, NEXT = "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"
FAMILIES = (DENSE, EXPERTS, NEXT)
# Maps with several blocks of 128 x 128, the last of which are smaller, and one shared expert.
SIZES = {"hidden_size": 160, "linear_value_head_dim": 40, "linear_key_head_dim": 24, "tie_word_embeddings": False}
ONE_SHARED = {"shared_expert_intermediate_size": 24}
AT = "layers.0.delta_net."
BETAS = re.compile(r"in_proj_(a|b|ba)\.weight$")
CHANNELS = {
    "fp8": compressed_tensors(),
    "int8": compressed_tensors(format="int-quantized", weights__type="int"),
    "fp8 of a tensor": vllm_fp8(),
}


def sizes_of(architecture):
    return SIZES | ({} if architecture == DENSE else ONE_SHARED)


def assert_computes_what_transformers_does(folder, wide):
    """The logits of ``folder`` in float32 are those of transformers with the weights ``wide`` that it stands for."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    text = np.random.default_rng(3).integers(97, size=140)
    [expected] = transformers_logits(wide, [text])
    config, params = load_folder(folder, "float32")
    [found] = jspec_logits(build(config.for_length(len(text)), params), [text])
    assert np.abs(found - expected).max() / np.abs(expected).max() < 2e-5


def not_converted(folder) -> list[str]:
    """The list of modules as Qwen publishes it, of a checkpoint whose tensors are floats."""
    plain = re.compile(
        r"(conv1d|in_proj_(a|b|ba)|mlp\.gate|shared_expert_gate|embed_tokens|lm_head|norm|mtp\.fc)\.weight$"
    )
    return [name.removesuffix(".weight") for name in load_file(folder / "model.safetensors") if plain.search(name)]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_blocks_as_published(tmp_path, architecture):
    """Of the model and of its layer for multi-token prediction. Betas, decays, routers and the convolution are plain."""
    wide = with_layers(tmp_path / "wide", architecture, **sizes_of(architecture))
    config = fp8_config(weight_block_size=[128, 128], modules_to_not_convert=not_converted(wide))
    src, out = stored_as(tmp_path / "src", wide, KEPT["qwen"]._replace(config=config)), tmp_path / "out"
    config, params = load_folder(src)
    assert (config.quantization, config.other_formats) == ("fp8_block", PLAIN_HEAD)
    for name, dtype in (("qkvz", FP8), ("out", FP8), ("ba", ml_dtypes.bfloat16)):
        assert params[f"{AT}{name}.weight"].dtype == dtype
    assert_stands_for(params, config, load_folder(wide)[1])
    assert config == Checkpoint.open(src).target_config
    assert_computes_what_transformers_does(src, wide)
    layer, drafts = load_draft(src, mtp=True)
    assert layer.layers.other_formats == (("fuse_in.0", None), *PLAIN_HEAD)
    assert drafts["layers.0.attention.qkv.weight"].dtype == FP8
    assert_stands_for(drafts, layer, load_draft(wide, "float32", mtp=True)[1])
    convert(src, out, verify="shapes")
    assert_same(load_folder(out), load_folder(src))
    assert_same(load_draft(out / "mtp"), (layer, drafts))


def test_parts_of_a_tensor_keep_the_scales_of_their_rows(tmp_path):
    """Rows of queries, keys, values and gates of a key head are neighbours in the files, and in different blocks."""
    wide = tiny_checkpoint(tmp_path / "wide", NEXT, **sizes_of(NEXT))
    src = stored_as(tmp_path / "src", wide, KEPT["qwen"])
    _, params = load_folder(src)
    numbers = raw_tensor(src, "model.layers.0.linear_attn.in_proj_qkvz.weight")
    scales = raw_tensor(src, "model.layers.0.linear_attn.in_proj_qkvz.weight_scale_inv").astype(np.float32)
    Nk, Dk, values = 4, 24, 2 * 40  # each key head has two value heads
    rows = np.arange(len(numbers)).reshape(Nk, 2 * Dk + 2 * values)
    order = np.concatenate([part.reshape(-1) for part in np.split(rows, [Dk, 2 * Dk, 2 * Dk + values], axis=1)])
    np.testing.assert_array_equal(params[f"{AT}qkvz.weight"].view(np.uint8), numbers[order].view(np.uint8))
    np.testing.assert_array_equal(params[f"{AT}qkvz.scale"], np.repeat(scales, 128, axis=0)[order])


def with_betas_in_blocks(folder, wide):
    """Store betas and decays in blocks, too, in both folders."""
    stored, floats = {}, load_file(wide / "model.safetensors")
    for name in [name for name in floats if BETAS.search(name)]:
        parts, floats[name] = fp8(floats[name], (128, 128))
        stored |= {name.removesuffix(".weight") + end: array for end, array in parts.items()}
    changed(folder, **{name.replace(".", "__"): array for name, array in stored.items()})
    write_weights(wide, floats)


@pytest.mark.parametrize("architecture", [DENSE, NEXT])
def test_betas_and_decays_in_blocks_are_dequantised(tmp_path, architecture):
    wide = tiny_checkpoint(tmp_path / "wide", architecture, **sizes_of(architecture))
    src = stored_as(tmp_path / "src", wide, KEPT["qwen"])
    with_betas_in_blocks(src, wide)
    with pytest.warns(UserWarning, match=r"layers\.0\.linear_attn\.in_proj_.* are dequantised as they are read"):
        config, params = load_folder(src)
    assert (config.quantization, config.other_formats) == ("fp8_block", PLAIN_HEAD)
    assert params[f"{AT}ba.weight"].dtype == ml_dtypes.bfloat16
    assert_stands_for(params, config, load_folder(wide)[1])
    report = convert(src, tmp_path / "out", verify="shapes")
    assert [note for note in report.notes if re.search("in_proj_.* are dequantised as they are read", note)]
    assert_same(load_folder(tmp_path / "out"), (config, params))


def with_betas_in_channels(folder, wide, kind):
    """Store betas and decays with a scale for each output channel, or for each weight, in both folders."""
    floats, stored = load_file(wide / "model.safetensors"), {}
    for name in [name for name in floats if BETAS.search(name)]:
        numbers, scale = quantize(floats[name], "int8" if kind == "int8" else "fp8")
        if kind.endswith("tensor"):
            scale = np.full_like(scale, scale.max())
            numbers = (floats[name] / scale[:, None]).astype(FP8)
        floats[name] = numbers.astype(np.float32) * scale[:, None]
        stored |= {name: numbers, f"{name}_scale": scale[:1] if kind.endswith("tensor") else scale[:, None]}
    changed(folder, **{name.replace(".", "__"): array for name, array in stored.items()})
    write_weights(wide, floats)


@pytest.mark.filterwarnings("ignore:.*in_proj_.* are dequantised as they are read:UserWarning")
@pytest.mark.parametrize("betas", [False, True])
@pytest.mark.parametrize("kind", CHANNELS)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_scale_for_each_output_channel_or_weight(tmp_path, architecture, kind, betas):
    """And betas and decays are dequantised where the files have them in eight bits, too."""
    src = fp8_checkpoint(tmp_path / "src", architecture, quantization=CHANNELS[kind], **sizes_of(architecture))
    wide, quantization = tmp_path / "src-wide", kind.partition(" ")[0]
    if betas:
        with_betas_in_channels(src, wide, kind)
        with pytest.warns(UserWarning, match=r"layers\.0\.linear_attn\.in_proj_.* are dequantised as they are read"):
            config, params = load_folder(src)
    else:
        config, params = load_folder(src)
    assert (config.quantization, config.other_formats) == (quantization, PLAIN_HEAD)
    assert config == Checkpoint.open(src).target_config
    assert params[f"{AT}qkvz.weight"].dtype == known_format(quantization).numbers
    assert params[f"{AT}ba.weight"].dtype == ml_dtypes.bfloat16
    _, floats = load_folder(wide, "float32")
    for name, stored in config.stored_params().items():
        found = params[name].astype(np.float32) * params[stored.names["scale"]][:, None]
        np.testing.assert_array_equal(found, floats[name], err_msg=name)
    assert_computes_what_transformers_does(src, wide)
    convert(src, tmp_path / "out", verify="shapes")
    assert_same(load_folder(tmp_path / "out"), (config, params))


def test_a_checkpoint_whose_betas_are_listed_as_plain(tmp_path):
    """As recipes for these models list them."""
    ignore = ("lm_head", "re:.*in_proj_a$", "re:.*in_proj_b$", "re:.*mlp.gate$", "re:.*shared_expert_gate$")
    src = fp8_checkpoint(tmp_path / "src", EXPERTS, quantization=compressed_tensors(ignore=ignore), **sizes_of(EXPERTS))
    assert not [name for name in names_in(src) if BETAS.search(name.removesuffix("_scale")) and name.endswith("scale")]
    config, _ = load_folder(src)
    assert (config.quantization, config.other_formats) == ("fp8", PLAIN_HEAD)
    assert_computes_what_transformers_does(src, tmp_path / "src-wide")


def test_some_delta_nets_that_are_plain(tmp_path):
    """Of layers that config.json lists as not quantised, the maps are plain."""
    names = [f"model.layers.0.linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z")]
    kind = KEPT["qwen"]
    wide = tiny_checkpoint(tmp_path / "wide", DENSE, **SIZES)
    quantization = {**kind.config, "modules_to_not_convert": names}
    src = stored_as(tmp_path / "src", wide, Kind(quantization, kind.store, kind.words, kind.sizes))
    floats = load_file(wide / "model.safetensors")
    plain = {f"{name}.weight": floats[f"{name}.weight"].astype(ml_dtypes.bfloat16) for name in names}
    scales = {f"{name}.weight_scale_inv": None for name in names}
    changed(src, **{name.replace(".", "__"): array for name, array in (plain | scales).items()})
    config, params = load_folder(src)
    assert config.other_formats == (("layers.0.delta_net.qkvz", None), *PLAIN_HEAD)
    assert params[f"{AT}qkvz.weight"].dtype == ml_dtypes.bfloat16
    assert params[f"{AT}out.weight"].dtype == FP8
    assert json.loads((src / "config.json").read_text())["quantization_config"]["modules_to_not_convert"] == names
