"""Checkpoints in which modules have formats of their own: each map is kept in its format, whatever the others are.

``test_malformed_maps`` breaks their tensors, and ``test_mixed_libraries`` has the tools write them."""

import functools
import json

import ml_dtypes
import numpy as np
import pytest
from block_checkpoints import KEPT_CODES, stored_as
from fp8_checkpoints import changed, compressed_tensors, raw_tensor
from mixed_checkpoints import ATTENTION, BLOCKS, MIXES, MLP, Mix, fp8_channel, groups, mixed_checkpoint, write_mixed
from mtp_checkpoints import with_layers
from packed_weights import gptq, gptq_config, nvfp4, nvfp4_config
from safetensors.numpy import load_file
from stored_params import assert_same, assert_stands_for, logits, refuses, rewrite, stored_checkpoint
from tiers import in_tiers
from tiny import SMALL

import jspec
from convert import convert, load_draft, load_folder
from convert.cli import main
from convert.folders import read_draft_config
from convert.manifest import write_manifest
from convert.verify import compare
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.converted.manifest import NAME
from jspec.models.params import abstract_params

MIXTURE = "Qwen3MoeForCausalLM"


def formats(config) -> dict[str, str | None]:
    """The format of each linear map of a model, by its name in the params."""
    stored = config.stored_params()
    maps = [name.removesuffix(".weight") for name in config.param_shapes() if name.endswith(".weight")]
    return {name: stored[f"{name}.weight"].form.name if f"{name}.weight" in stored else None for name in maps}


@pytest.mark.parametrize("name", MIXES)
def test_each_map_stays_in_its_format(tmp_path, name):
    """Number by number, without a warning, and so they do in a converted folder."""
    mix, out = MIXES[name], tmp_path / "out"
    src = mixed_checkpoint(tmp_path / "src", mix)
    config, params = load_folder(src)
    assert formats(config).items() >= mix.kept.items()
    assert {config.quantization_of(name) for name in mix.kept} == set(mix.kept.values())
    assert config == Checkpoint.open(src).target_config == read_draft_config(src)
    assert {n: (a.shape, a.dtype) for n, a in params.items()} == {
        n: (leaf.shape, leaf.dtype) for n, leaf in abstract_params(config, "bfloat16").items()
    }
    assert sum(array.nbytes for array in params.values()) == config.weight_bytes(2)
    assert_stands_for(params, config, load_folder(tmp_path / "src-wide")[1])
    report = convert(src, out, verify="shapes")
    assert report.quantization == config.formats
    assert any(f"{config.formats} weights verified" in note and "as they are stored" in note for note in report.notes)
    assert_same((config, params), load_folder(out))


@pytest.mark.parametrize("name", in_tiers(MIXES, test=["FP8 and NVFP4", "values in eight bits", "GPTQ"]))
def test_logits_are_those_of_the_numbers_in_the_files(tmp_path, name):
    src = mixed_checkpoint(tmp_path / "src", MIXES[name])
    assert compare(logits(tmp_path / "src-wide"), logits(src)).exact


def test_experts_may_have_another_format_than_attention(tmp_path):
    """Blocks of FP8, and NVFP4 of an MLP that is no mixture, too, which no group names."""
    src = mixed_checkpoint(tmp_path / "src", BLOCKS, MIXTURE)
    config, params = load_folder(src)
    assert formats(config).items() >= {"layers.1.mlp.gate_up": "nvfp4", "layers.0.attention.qkv": "fp8_block"}.items()
    assert config.quantization_of("layers.0.mlp.down") is None
    assert_stands_for(params, config, load_folder(tmp_path / "src-wide")[1])
    assert compare(logits(tmp_path / "src-wide"), logits(src)).exact


def test_parts_of_a_parameter_that_have_no_format_in_common(tmp_path):
    """Keys in NVFP4 beside queries and values in FP8: all are dequantised, and a warning names each with its format."""
    mix = MIXES["FP8 and NVFP4"]._replace(
        config=groups((compressed_tensors(), [r"re:.*\.0\.self_attn\.[qvo]_proj"]), (nvfp4_config(), ["Linear"])),
        stores={r".*\.0\.self_attn\.[qvo]_proj\.weight": fp8_channel, f"{ATTENTION}|{MLP}": nvfp4},
    )
    src = mixed_checkpoint(tmp_path / "src", mix)
    first = r"0\.self_attn\.q_proj, model\.layers\.0\.self_attn\.v_proj, stored in FP8 with .*, are .* instead of one; "
    with pytest.warns(
        UserWarning, match=first + r"model\.layers\.0\.self_attn\.k_proj, stored in NVFP4, .* half a one"
    ):
        config, params = load_folder(src)
    others = (("layers.0.attention.qkv", None), ("layers.0.attention.out", "fp8"), ("head", None))
    assert (config.quantization, config.other_formats) == ("nvfp4", others)
    assert params["layers.0.attention.qkv.weight"].dtype == ml_dtypes.bfloat16
    assert_stands_for(params, config, load_folder(tmp_path / "src-wide")[1])


def test_the_tensors_say_which_of_several_formats_a_module_has(tmp_path):
    """Where two groups name it, and where a group names one that is plain."""
    names = [r"re:.*(self_attn|0\.mlp)\..*_proj$"]
    config = groups((compressed_tensors(), names), (nvfp4_config(), ["Linear", "lm_head"]), ignore=[])
    mix = MIXES["FP8 and NVFP4"]._replace(config=config)
    src = mixed_checkpoint(tmp_path / "src", mix)
    assert formats(load_folder(src)[0]).items() >= mix.kept.items()


def test_a_module_without_a_format_is_refused(tmp_path):
    mix = MIXES["FP8 and NVFP4"]
    config = groups((compressed_tensors(), [r"re:.*self_attn\.[qkv]_proj"]), (nvfp4_config(), ["re:.*mlp.*"]))
    src = mixed_checkpoint(tmp_path / "src", mix._replace(config=config))
    refuses(
        src, "src/config.json: quantization_config has no format for 'model.layers.0.self_attn.o_proj', but model.saf"
    )
    refuses(src, "holds 'model.layers.0.self_attn.o_proj.weight_scale'; name the module among those of its format")


def test_the_other_file_of_model_optimizer(tmp_path):
    """Which says the same as config.json, or says it alone."""
    mix, other = MIXES["Model Optimizer"], "hf_quant_config.json"
    src = mixed_checkpoint(tmp_path / "src", mix)
    wanted = load_folder(src)
    layers = mix.config["quantized_layers"]
    described = {"producer": {}, "quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    (src / other).write_text(json.dumps(described))
    assert_same(load_folder(src), wanted)
    rewrite(src, quantization_config=None)
    assert_same(load_folder(src), wanted)
    first = next(iter(layers))
    rewrite(src, quantization_config={**mix.config, "quantized_layers": {**layers, first: {"quant_algo": "NVFP4"}}})
    refuses(src, f"src/{other}: quantization.quantized_layers={{'{first}': ")


def test_a_damaged_checkpoint_leaves_no_folder(tmp_path, capsys):
    """A scale that is NaN is found while the folder is written."""
    src = mixed_checkpoint(tmp_path / "src", MIXES["values in eight bits"])
    name = "model.layers.1.self_attn.k_proj.weight_scale"  # of four bits, which are kept in eight
    scales = raw_tensor(src, name).copy()
    scales[-1, -1] = np.nan
    changed(src, **{name: scales})
    assert main([str(src), str(tmp_path / "out")]) == 2
    assert f"tensor '{name}' holds nan: expected numbers other than 0" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


TABLES = {
    "of the official Qwen3.5": {
        "lm_head": {},
        "model.language_model.embed_tokens": {},
        "-:.*attn.*": {},
        "-:.*mtp.*": {},
    },
    "with the settings of all": {r"+:.*down_proj": {"bits": 4, "group_size": 32}, "-:lm_head": {}, ".*": None},
}


@pytest.mark.parametrize("name", TABLES)
def test_entries_that_change_nothing(tmp_path, name):
    src = stored_checkpoint(tmp_path / "src", "gptq")
    wanted = load_folder(src)
    rewrite(src, quantization_config=gptq_config(group_size=32, dynamic=TABLES[name]))
    assert_same(load_folder(src), wanted)


WITH_LAYERS = ("Glm4MoeForCausalLM", {**MIXES["GPTQ"].sizes, "moe_intermediate_size": 64, "num_hidden_layers": 2})


def with_mixed_layers(folder):
    """A model with experts in GPTQ of four bits, and with a multi-token prediction layer whose attention has eight."""
    architecture, sizes = WITH_LAYERS
    tensors = load_file(with_layers(folder / "wide", architecture, **sizes) / "model.safetensors")
    config = gptq_config(group_size=32, dynamic={r".*\.2\.self_attn\..*": {"bits": 8}, "-:.*eh_proj": {}})
    stores = {
        r".*\.2\.self_attn\..*_proj\.weight": functools.partial(gptq, group_size=32, bits=8),
        r".*(self_attn|mlp|experts)\..*_proj\.weight": functools.partial(gptq, group_size=32),
    }
    return write_mixed(folder / "src", folder / "wide", Mix(config, stores, {}, {}), tensors)


def test_multi_token_prediction_layers_have_formats_of_their_own(tmp_path):
    """By the names that they have in the checkpoint, and in a converted folder, too."""
    src = with_mixed_layers(tmp_path)
    config, params = load_draft(src, mtp=True)
    assert config.layers.quantization_of("layers.0.attention.qkv") == "int8_32_float16_zeros"
    assert config.layers.quantization_of("layers.0.mlp.down") == "int4_32_float16_zeros"
    assert config.layers.quantization_of("fuse_in.0") is None
    assert_stands_for(params, config, load_draft(tmp_path / "wide", "float32", mtp=True)[1])
    convert(src, tmp_path / "out", verify="shapes")
    assert_same(load_folder(tmp_path / "out"), load_folder(src))
    assert_same(load_draft(tmp_path / "out" / "mtp"), (config, params))


def test_folders_of_earlier_versions_load(tmp_path):
    """Whose manifests list the maps that are not quantised, and say of the output head whether it is."""
    wide = with_layers(tmp_path / "wide", "Glm4MoeForCausalLM", **{**WITH_LAYERS[1], "intermediate_size": 128})
    out = convert(stored_as(tmp_path / "src", wide, KEPT_CODES["gptq"]), tmp_path / "out").out
    wanted, further = load_folder(out), load_draft(out / "mtp")
    for folder in (out / "mtp", out):
        manifest = json.loads((folder / NAME).read_text())
        head = manifest.get("head")
        for described in (manifest, *([] if head is None else [head["config"]["layers"]])):
            plain = [name for name, form in described.pop("other_formats") if form is None]
            described |= {"quantized_head": "head" not in plain, "plain_maps": [one for one in plain if one != "head"]}
        own = ("format", "format_version", "versions", "files", "sizes", "manifest_sha256")
        write_manifest(folder, {key: value for key, value in manifest.items() if key not in own})
    assert_same(load_folder(out), wanted)
    assert_same(load_draft(out / "mtp"), further)


def test_a_mixed_model_is_served(tmp_path):
    src = mixed_checkpoint(tmp_path / "src", MIXES["GPTQ"])
    found, wanted = (
        jspec.load(path, dtype="float32", **SMALL).logits([3, 4, 5, 6]) for path in (src, tmp_path / "src-wide")
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
