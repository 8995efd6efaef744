"""Checkpoints with gated delta nets that are not read: refused by the name of a key or a tensor, and nothing is loaded."""

import ml_dtypes
import numpy as np
import pytest
from resaved import resave, set_keys
from safetensors.numpy import load_file
from tiny import tiny_checkpoint, write_weights

from convert import Refusal, convert, load_folder
from jspec.checkpoints.checkpoint import Checkpoint

FAMILIES = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM")
LINEAR, FULL = "linear_attention", "full_attention"
AT = "model.layers.0.linear_attn."


def assert_refused(folder, message: str):
    """By the loader and by the converter, before any weight is used."""
    with pytest.raises(Refusal, match=message):
        load_folder(folder)
    with pytest.raises(Refusal, match=message):
        convert(folder, folder.parent / "out")
    assert not (folder.parent / "out").exists()


CONFIGS = [
    (
        {"layer_types": [LINEAR, "sliding_attention"]},
        r"layer_types=.*: expected 2 entries, each linear_attention or full_",
    ),
    ({"layer_types": [LINEAR, None]}, r"layer_types=.*: expected 2 entries, each "),
    ({"layer_types": [LINEAR, [FULL]]}, r"layer_types=.*: expected 2 entries, each "),
    ({"layer_types": [LINEAR, LINEAR, FULL]}, r"layer_types=.*: expected 2 entries"),
    ({"layer_types": [FULL]}, r"layer_types=.*: expected 2 entries"),
    ({"layer_types": []}, r"layer_types=\[\]: expected 2 entries"),
    ({"layer_types": {"0": FULL}}, r"layer_types=.*: expected 2 entries"),
    ({"layer_types": [LINEAR, LINEAR]}, r"layer_types=.*: expected full_attention for one layer or more"),
    ({"layer_types": ..., "full_attention_interval": 4}, r"layer_types=None: expected full_attention for one layer or"),
    (
        {"full_attention_interval": 1},
        r"full_attention_interval=1: expected what layer_types says, which has linear_attention for layer 0; correct the",
    ),
    ({"full_attention_interval": 0}, r"full_attention_interval=0: expected an integer"),
    ({"full_attention_interval": "4"}, r"full_attention_interval='4': expected an integer"),
    ({"mtp_use_dedicated_embeddings": True}, r"mtp_use_dedicated_embeddings=True: expected false"),
    ({"mtp_num_hidden_layers": 2}, r"mtp_num_hidden_layers=2: expected 0 or 1"),
    ({"attn_output_gate": False}, r"attn_output_gate=False: expected true"),
    ({"mamba_ssm_dtype": "bfloat16"}, r"mamba_ssm_dtype='bfloat16': expected 'float32'"),
    ({"hidden_act": "gelu"}, r"hidden_act='gelu': expected 'silu' or 'swish'"),
    ({"mamba_ssm_dtype": "auto"}, r"mamba_ssm_dtype='auto': expected 'float32'"),
    ({"linear_num_value_heads": 6}, r"linear_num_value_heads=6: expected a multiple of linear_num_key_heads, 4"),
    ({"linear_num_value_heads": 2}, r"linear_num_value_heads=2: expected a multiple of linear_num_key_heads, 4"),
    ({"linear_num_key_heads": 0}, r"linear_num_key_heads=0: expected an integer"),
    ({"linear_conv_kernel_dim": 1}, r"linear_conv_kernel_dim=1: expected an integer in 2\.\.64"),
    ({"linear_conv_kernel_dim": 65}, r"linear_conv_kernel_dim=65: expected an integer in 2\.\.64"),
    ({"linear_key_head_dim": 16}, r"tensor 'model\.layers\.0\.linear_attn\.\w+\.weight' has shape"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, r"rope_scaling"),
]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_configs(tmp_path, architecture):
    folder = tiny_checkpoint(tmp_path / "src", architecture)
    whole = (folder / "config.json").read_text()
    for changes, message in CONFIGS:
        (folder / "config.json").write_text(whole)
        set_keys(folder, **changes)
        assert_refused(folder, message)


def test_an_interval_that_agrees_is_read(tmp_path):
    """Of both keys, of one, and of none: every fourth layer has attention then."""
    sizes = {"num_hidden_layers": 4, "layer_types": [LINEAR] * 3 + [FULL]}
    folder = tiny_checkpoint(tmp_path / "src", "Qwen3_5ForCausalLM", **sizes)
    wanted = load_folder(folder)[0]
    for changes in (
        {"full_attention_interval": 4},
        {"full_attention_interval": 4, "layer_types": ...},
        {"full_attention_interval": ..., "layer_types": ...},
    ):
        set_keys(folder, **changes)
        assert load_folder(folder)[0] == wanted


def with_number(name, number):
    def change(tensors):
        array = tensors[AT + name].copy()
        array.reshape(-1)[3] = number
        return {**tensors, AT + name: array}

    return change


def without(name):
    return lambda tensors: {key: array for key, array in tensors.items() if key != AT + name}


def cut(name):
    return lambda tensors: {**tensors, AT + name: tensors[AT + name][:-1]}


def as_integers(name):
    return lambda tensors: {**tensors, AT + name: tensors[AT + name].astype(np.int32)}


TENSORS = [
    *(
        (with_number("A_log", number), r"linear_attn\.A_log' holds -?(inf|nan): expected finite numbers")
        for number in (np.inf, -np.inf, np.nan)
    ),
    *(
        (with_number("dt_bias", number), r"linear_attn\.dt_bias' holds -?(inf|nan): expected finite numbers")
        for number in (np.inf, np.nan)
    ),
    *(
        (without(name), rf"tensor 'model\.layers\.0\.linear_attn\.{name}' is missing".replace(".weight", r"\.weight"))
        for name in ("conv1d.weight", "A_log", "dt_bias", "norm.weight", "out_proj.weight")
    ),
    *((cut(name), rf"tensor 'model\.layers\.0\.linear_attn\.{name}' has shape") for name in ("A_log", "dt_bias")),
    (cut("conv1d.weight"), r"tensor 'model\.layers\.0\.linear_attn\.conv1d\.weight' has shape"),
    *((as_integers(name), rf"linear_attn\.{name}' is stored as int32, but ") for name in ("A_log", r"conv1d.weight")),
]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("number", range(len(TENSORS)))
def test_tensors(tmp_path, number, dtype):
    change, message = TENSORS[number]
    folder = tiny_checkpoint(tmp_path / "src", "Qwen3_5ForCausalLM", dtype=dtype)
    write_weights(folder, change(load_file(folder / "model.safetensors")))
    assert_refused(folder, message)


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("Qwen3_5ForCausalLM", ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")),
        ("Qwen3NextForCausalLM", ("in_proj_qkvz", "in_proj_ba")),
    ],
)
def test_projections(tmp_path, architecture, names):
    folder = tiny_checkpoint(tmp_path / "src", architecture)
    tensors = load_file(folder / "model.safetensors")
    for name in names:
        at = f"{AT}{name}.weight"
        write_weights(folder, {key: array for key, array in tensors.items() if key != at})
        assert_refused(folder, rf"tensor '{at}' is missing")
        write_weights(folder, {**tensors, at: tensors[at][:-1]})
        assert_refused(folder, rf"tensor '{at}' has shape \[{len(tensors[at]) - 1}, 64\], but config\.json asks for")


def test_parts_of_other_tensors_are_called_by_the_tensor(tmp_path):
    """A tensor that goes into several parameters is missing as a whole."""
    for architecture, name in (
        ("DeepseekV3ForCausalLM", "model.layers.1.self_attn.kv_b_proj.weight"),
        ("Qwen3NextForCausalLM", "model.layers.1.self_attn.q_proj.weight"),
    ):
        folder = tiny_checkpoint(tmp_path / architecture, architecture)
        resave(folder, drop=[name])
        with pytest.raises(Refusal, match=rf"tensor '{name}' is missing"):
            load_folder(folder)


def test_nothing_is_read_before_numbers_are_found_to_be_finite(tmp_path, monkeypatch):
    folder = tiny_checkpoint(tmp_path / "src", "Qwen3_5ForCausalLM")
    write_weights(folder, with_number("A_log", np.inf)(load_file(folder / "model.safetensors")))
    checkpoint = Checkpoint.open(folder)
    monkeypatch.setattr(
        "jspec.checkpoints.huggingface.model.HuggingFaceModel.param", lambda *_: pytest.fail("weights were read")
    )
    with pytest.raises(Refusal, match="A_log' holds inf"):
        checkpoint.params()


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_decays_stay_in_float32(tmp_path, stored):
    """In whatever type the files have them, and whatever the others are read in."""
    folder = tiny_checkpoint(tmp_path / "src", "Qwen3_5ForCausalLM", dtype=stored)
    tensors = load_file(folder / "model.safetensors")
    wide = {name: array.astype(np.float32) if "linear_attn" in name else array for name, array in tensors.items()}
    write_weights(folder, wide)
    _, params = load_folder(folder, "bfloat16")
    for ours, theirs in (("decay", "A_log"), ("bias", "dt_bias")):
        assert params[f"layers.0.delta_net.{ours}"].dtype == np.float32
        np.testing.assert_array_equal(params[f"layers.0.delta_net.{ours}"], wide[AT + theirs])
    assert params["layers.0.delta_net.ba.weight"].dtype == ml_dtypes.bfloat16
