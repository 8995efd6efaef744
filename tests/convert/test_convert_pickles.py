"""Files of ``torch.save``: every number as torch reads it, found without torch, and only where pickles are allowed."""

import json
import os
from collections import OrderedDict

import numpy as np
import pytest
from tiny import tiny_checkpoint

import jspec
from convert import Refusal, convert, load_folder
from convert.cli import main
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.pickles import read_pickle_header

torch = pytest.importorskip("torch")
load_torch = pytest.importorskip("safetensors.torch").load_file

FORMATS = {
    "zip": {},
    "zip, protocol 4": {"pickle_protocol": 4},
    "zip, protocol 5": {"pickle_protocol": 5},
    "before 1.6": {"_use_new_zipfile_serialization": False},
}
DTYPES = ("float32", "bfloat16", "float16", "int64", "int32", "bool")


def random(*shape: int, dtype: str = "float32"):
    numbers = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(0))
    return (numbers > 0) if dtype == "bool" else (numbers / 7).to(getattr(torch, dtype))


def read(tmp_path, state_dict, **how) -> dict[str, np.ndarray]:
    torch.save(state_dict, tmp_path / "heads.pt", **how)
    return {name: tensor.read() for name, tensor in read_pickle_header(Folder(tmp_path), "heads.pt").items()}


def same(found: np.ndarray, expected) -> bool:
    contiguous = expected.detach().contiguous()
    return (
        found.shape == tuple(expected.shape)
        and f"torch.{found.dtype.name}" == str(expected.dtype)
        and found.tobytes() == bytes(contiguous.flatten().view(torch.uint8).tolist())
    )


@pytest.mark.parametrize("how", FORMATS.values(), ids=FORMATS)
def test_every_dtype(tmp_path, how):
    state_dict = {dtype: random(5, 3, dtype=dtype) for dtype in DTYPES}
    found = read(tmp_path, state_dict, **how)
    assert found.keys() == state_dict.keys()
    assert all(same(found[name], tensor) for name, tensor in state_dict.items())


@pytest.mark.parametrize("how", FORMATS.values(), ids=FORMATS)
def test_every_layout(tmp_path, how):
    whole = random(6, 8)
    state_dict = {
        "whole": whole,
        "the same again": whole,
        "transposed": whole.T,
        "strided": whole[1:5:2, ::3],
        "permuted": random(2, 3, 4).permute(2, 0, 1),
        "row": whole[3:4],
        "last": whole[5, 7],
        "repeated": whole[0].expand(3, 8),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "parameter": torch.nn.Parameter(random(3)),
    }
    found = read(tmp_path, state_dict, **how)
    assert found.keys() == state_dict.keys()
    assert all(same(found[name], tensor) for name, tensor in state_dict.items())


def test_state_dict_of_a_module(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    state_dict = module.state_dict()
    assert isinstance(state_dict, OrderedDict)
    assert state_dict._metadata  # which BUILD gives it
    found = read(tmp_path, state_dict)
    assert found.keys() == state_dict.keys()
    assert all(same(found[name], tensor) for name, tensor in state_dict.items())


def test_plain_values_are_left_out(tmp_path):
    found = read(tmp_path, {"step": 10**12, "loss": 0.5, "note": "fine", "flag": True, "none": None, "w": random(2)})
    assert found.keys() == {"w"}


@pytest.mark.parametrize(
    ("state_dict", "reason"),
    [
        ({"state_dict": {"w": torch.zeros(2)}}, "dict under 'state_dict'"),
        ([torch.zeros(2)], "holds a list"),
        ({0: torch.zeros(2)}, "holds a int for a key"),
        ({"w": torch.zeros(2, dtype=torch.float64)}, "'w' is stored as float64"),
        ({"w": torch.zeros(2, dtype=torch.complex64)}, "torch.ComplexFloatStorage"),
        ({"w": torch.zeros(2).to(torch.float8_e4m3fn)}, "torch."),
        ({"w": torch.zeros(2).to_sparse()}, "torch._utils._rebuild_sparse_tensor"),
        ({"\x1b[2J": torch.zeros(2)}, "tensor name"),
        (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
    ],
)
def test_pickles_of_other_objects_are_refused(tmp_path, state_dict, reason):
    with pytest.raises(Refusal, match=r"heads\.pt: ") as refusal:
        read(tmp_path, state_dict)
    assert reason in str(refusal.value)


def pickled(folder, shards: int = 1, name: str = "pytorch_model.bin"):
    """The safetensors file of ``folder`` as files of torch.save instead."""
    tensors = load_torch(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, folder / name)
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"pytorch_model-{shard + 1:05d}-of-{shards:05d}.bin"
        held = {key: tensors[key] for key in list(tensors)[shard::shards]}
        torch.save(held, folder / file)
        weight_map |= dict.fromkeys(held, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_checkpoint_equals_its_safetensors_reference(tmp_path, shards, stored):
    reference = tiny_checkpoint(tmp_path / "reference", dtype=stored)
    src = pickled(tiny_checkpoint(tmp_path / "src", dtype=stored), shards)
    assert main([str(src), str(tmp_path / "out"), "--allow-pickle", "--verify", "shapes"]) == 0
    convert(reference, tmp_path / "out-reference")
    (config, params), (reference_config, reference_params) = (
        load_folder(tmp_path / out) for out in ("out", "out-reference")
    )
    assert config == reference_config
    assert params.keys() == reference_params.keys()
    for name, array in params.items():
        assert array.dtype == reference_params[name].dtype
        assert array.tobytes() == reference_params[name].tobytes()


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "consolidated.00.pth", "anything.bin"])
def test_the_only_file_is_the_weights(single, name):
    pickled(single, name=name)
    assert Checkpoint.open(single, allow_pickle=True).hugging_face.missing == []


def test_pickles_are_refused_by_default(refused, single):
    pickled(single)
    refused(single, "src/pytorch_model.bin", "pickle", "jspec-convert --allow-pickle", "safetensors")
    assert main([str(single), "--dry-run"]) == 2
    assert main([str(single), "--dry-run", "--allow-pickle"]) == 0
    with pytest.raises(Refusal, match="jspec-convert --allow-pickle"):
        jspec.load(single)
    with pytest.raises(Refusal, match="allow_pickle=True"):
        convert(single, single.parent / "out")


def test_safetensors_come_first(single):
    (single / "pytorch_model.bin").write_bytes(b"never read")
    assert Checkpoint.open(single, allow_pickle=True).hugging_face.is_pickled is False


def test_several_files_that_could_be_meant(single):
    pickled(single, name="a.bin")
    (single / "b.pt").write_bytes(b"")
    with pytest.raises(Refusal, match=r"a\.bin, b\.pt could each be the weights"):
        Checkpoint.open(single, allow_pickle=True).hugging_face.require_match()
    os.rename(single / "a.bin", single / "pytorch_model.bin")
    assert Checkpoint.open(single, allow_pickle=True).hugging_face.missing == []


def test_link_that_leaves_the_folder(single):
    pickled(single)
    os.rename(single / "pytorch_model.bin", single.parent / "elsewhere")
    (single / "pytorch_model.bin").symlink_to(single.parent / "elsewhere")
    with pytest.raises(Refusal, match="symbolic link that leaves the folder"):
        Checkpoint.open(single, allow_pickle=True).hugging_face.require_match()


@pytest.mark.parametrize("shard", ["../elsewhere.bin", "model.safetensors", "pytorch_model.pkl"])
def test_shard_that_is_no_bin_of_the_folder(single, shard):
    index = single / "pytorch_model.bin.index.json"
    os.rename(single / "model.safetensors", single.parent / "elsewhere.bin")
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    with pytest.raises(Refusal, match=r"index\.json: .*is refused"):
        Checkpoint.open(single, allow_pickle=True).hugging_face.require_match()


def test_logits_are_not_verified_by_unpickling_here(single, capsys):
    pickled(single)
    assert main([str(single), str(single.parent / "out"), "--allow-pickle", "--verify", "logits"]) == 2
    assert "--verify logits" in capsys.readouterr().err
    assert not (single.parent / "out").exists()


@pytest.mark.parametrize("dtype", ["int64", "int32", "bool"])
def test_integers_in_the_place_of_a_weight(single, dtype):
    tensors = load_torch(single / "model.safetensors")
    (single / "model.safetensors").unlink()
    torch.save({**tensors, "model.norm.weight": random(64, dtype=dtype)}, single / "pytorch_model.bin")
    with pytest.raises(Refusal, match=rf"pytorch_model\.bin: tensor 'model\.norm\.weight' is stored as {dtype}"):
        convert(single, single.parent / "out", allow_pickle=True)
