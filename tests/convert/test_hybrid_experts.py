"""Experts of Qwen3.5: one by one, as transformers writes them, or stacked as they are published, which is not transposed."""

import numpy as np
import pytest
from hybrid_checkpoints import DOWN, GATE_UP, save_hybrid, stack
from packed_weights import fp8, fp8_config
from resaved import set_keys
from safetensors.numpy import load_file, save_file

from convert import Refusal, convert, load_draft, load_folder
from jspec.config.tensor_names import NAMES

pytest.importorskip("torch")
pytest.importorskip("transformers")

LAYER, MTP = "model.layers.0.mlp.experts", "mtp.layers.0.mlp.experts"


def write(folder, tensors):
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})


def same(found, wanted):
    (config, params), (again, others) = found, wanted
    assert config == again
    assert params.keys() == others.keys()
    assert all(np.array_equal(params[name], others[name]) for name in params)


def assert_same(folder, model, head):
    """That the folder holds this model and this layer for multi-token prediction."""
    same(load_folder(folder, "float32"), model)
    same(load_draft(folder, "float32", mtp=True), head)


@pytest.fixture
def single(tmp_path):
    """A function: width of an expert -> a folder with a tensor for each map, and what it is read as."""

    def saved(width):
        folder = tmp_path / "src"
        save_hybrid(folder, "qwen3.5-moe", moe_intermediate_size=width, shared_expert_intermediate_size=width)
        assert f"{LAYER}.6.up_proj.weight" in load_file(folder / "model.safetensors")
        return folder, load_folder(folder, "float32"), load_draft(folder, "float32", mtp=True)

    return saved


@pytest.mark.parametrize("width", [24, 32, 64])  # gate and up are square at half of D, and down at D
@pytest.mark.parametrize("only", ["all", "model", "layer"])
def test_stacked_experts_are_those_of_single_ones(single, tmp_path, width, only):
    """Of the model, of the layer for multi-token prediction, or of both."""
    folder, *wanted = single(width)
    tensors = load_file(folder / "model.safetensors")
    start = {"all": "", "model": "model.", "layer": "mtp."}[only]
    mine = {name: array for name, array in tensors.items() if name.startswith(start)}
    write(folder, {**{name: array for name, array in tensors.items() if name not in mine}, **stack(mine)})
    stored = load_file(folder / "model.safetensors")
    assert f"{MTP if only == 'layer' else LAYER}.{GATE_UP}" in stored
    assert_same(folder, *wanted)
    convert(folder, tmp_path / "out", dtype="float32")
    same(load_folder(tmp_path / "out"), wanted[0])
    same(load_draft(tmp_path / "out" / "mtp"), wanted[1])


@pytest.mark.parametrize(("part", "width"), [(GATE_UP, 32), (DOWN, 64)])
def test_a_square_tensor_alone_is_not_transposed(single, part, width):
    """Its shape says nothing where the other map has a tensor for each expert."""
    folder, *wanted = single(width)
    tensors = load_file(folder / "model.safetensors")
    names = ("gate_proj", "up_proj") if part == GATE_UP else ("down_proj",)
    taken = {name for name in tensors if ".experts." in name and name.split(".")[-2] in names}
    stacked = {name: array for name, array in stack(tensors_of_both(tensors)).items() if name.endswith(f".{part}")}
    assert {array.shape[1:] for array in stacked.values()} == {(64, 64)}
    write(folder, {**{name: array for name, array in tensors.items() if name not in taken}, **stacked})
    assert_same(folder, *wanted)


def tensors_of_both(tensors):
    return {name: array for name, array in tensors.items() if ".experts." in name}


def test_the_architecture_says_what_a_square_tensor_is():
    """Qwen3-VL publishes input features first, and is read as Qwen3."""
    assert [name for name, names in NAMES.items() if names.transposed_experts] == ["Qwen3MoeForCausalLM"]


BLOCK = (12, 24)  # output features of which gate and up have two blocks each


def test_stacked_experts_in_fp8(single):
    """With a scale for each block, in the model and in its layer for multi-token prediction."""
    folder, *_ = single(24)
    stored = stack(load_file(folder / "model.safetensors"))
    wide = dict(stored)
    for name in [name for name in stored if ".experts." in name]:
        made = [fp8(expert, BLOCK) for expert in stored[name]]
        numbers, scales = (np.stack([parts[end] for parts, _ in made]) for end in (".weight", ".weight_scale_inv"))
        stored |= {name: numbers, f"{name}_scale_inv": scales}
        wide[name] = np.stack([weight for _, weight in made])
    write(folder, wide)
    wanted = load_folder(folder, "float32"), load_draft(folder, "float32", mtp=True)
    write(folder, stored)
    set_keys(folder, quantization_config=fp8_config(weight_block_size=list(BLOCK)))
    with pytest.warns(UserWarning, match="FP8 with a scale for each block of 12 x 24"):
        assert_same(folder, *wanted)


@pytest.mark.parametrize("at", [LAYER, MTP])
def test_an_expert_that_is_stored_twice_is_refused(single, at):
    folder, *_ = single(24)
    tensors = load_file(folder / "model.safetensors")
    write(folder, {**stack(tensors), f"{at}.3.down_proj.weight": tensors[f"{at}.3.down_proj.weight"]})
    with pytest.raises(
        Refusal, match=rf"'{at}\.down_proj' besides '{at}\.3\.down_proj\.weight', which is a part of it"
    ):
        load_draft(folder, mtp=True) if at == MTP else load_folder(folder)
