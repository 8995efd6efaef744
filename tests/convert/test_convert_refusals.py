"""Folders that are refused: exit code 2, one sentence on stderr that names the file, and nothing written."""

import json
import pickle
import struct

import numpy as np
import pytest
from resaved import resave, set_keys
from safetensors.numpy import load_file, save_file
from tiny import tiny_checkpoint

from convert import Refusal, load_folder
from convert.cli import main


def test_missing_folder(refused, tmp_path):
    (tmp_path / "src").mkdir()
    refused(tmp_path / "src", "config.json")
    assert main([str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 2


def test_unknown_architecture(refused, single):
    set_keys(single, architectures=["GPT2LMHeadModel"])
    refused(single, "config.json", "GPT2LMHeadModel", "expected one class of those that docs/guides/models.md lists")


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_remote_code_is_not_run(refused, single, name):
    canary = single / "canary"
    code = f"open({str(canary)!r}, 'w').write('run')\nclass Model: pass\n"
    (single / "modeling_canary.py").write_text(code)
    (single / "tokenizer_config.json").write_text("{}")
    set_keys(
        single / name, auto_map={"AutoModelForCausalLM": "modeling_canary.Model", "AutoTokenizer": ["canary.T", None]}
    )
    refused(single, name, "auto_map")
    assert main([str(single), "--dry-run"]) == 2
    with pytest.raises(Refusal):
        load_folder(single)
    assert not canary.exists()


class Bomb:
    """Unpickling it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickle(refused, single, name):
    (single / "model.safetensors").unlink()
    canary = single / "canary"
    (single / name).write_bytes(pickle.dumps(Bomb(canary)))
    refused(single, name, "pickle")
    assert not canary.exists()


def test_no_weights(refused, single):
    (single / "model.safetensors").unlink()
    refused(single, "src", "model.safetensors.index.json")


def test_safetensors_of_other_names(refused, single):
    (single / "model.safetensors").rename(single / "weights.safetensors")
    refused(single, "neither model.safetensors nor", "rename weights.safetensors to model.safetensors, if it holds all")
    (single / "weights.safetensors").rename(single / "model-00001-of-00002.safetensors")
    (single / "model-00002-of-00002.safetensors").write_bytes(b"")
    shards = "nothing says which tensors model-00001-of-00002.safetensors to model-00002-of-00002.safetensors hold"
    refused(single, shards, "fetch model.safetensors.index.json, or write it: {", "weight_map")


def test_an_adapter_is_no_model(refused, single):
    (single / "config.json").rename(single / "adapter_config.json")
    refused(single, "src/adapter_config.json: this is a LoRA adapter", "UNO", "merge it into its base model")


def boundaries(path) -> list[int]:
    """Sizes at which the file breaks off: nothing, inside the header, at its end, at each tensor, one byte short."""
    data = path.read_bytes()
    [header_size] = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + header_size])
    ends = [8 + header_size + t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"]
    return sorted({0, 4, 8, 8 + header_size // 2, 8 + header_size, *ends, len(data) - 1} - {len(data)})


def test_truncated_at_every_boundary(refused, single):
    path = single / "model.safetensors"
    whole, cuts = path.read_bytes(), boundaries(path)
    assert len(cuts) > 20
    for cut in cuts:
        path.write_bytes(whole[:cut])
        refused(single, "src/model.safetensors", "truncated")


@pytest.mark.parametrize("damage", ["padded", "long header", "header of another size", "no JSON"])
def test_damaged_safetensors(refused, single, damage):
    path = single / "model.safetensors"
    data = bytearray(path.read_bytes())
    if damage == "padded":
        data += b"\0"
    elif damage == "long header":
        data[:8] = struct.pack("<Q", 2**62)
    elif damage == "header of another size":
        data[:8] = struct.pack("<Q", struct.unpack("<Q", data[:8])[0] + 8)
    else:
        data[8:12] = b"\xff\xff\xff\xff"
    path.write_bytes(data)
    refused(single, "src/model.safetensors")


def test_dtype_that_cannot_be_read(refused, single):
    header = {"model.norm.weight": {"dtype": "F8_E5M2", "shape": [64], "data_offsets": [0, 64]}}
    text = json.dumps(header).encode()
    (single / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
    refused(single, "model.safetensors", "model.norm.weight", "F8_E5M2")


@pytest.mark.parametrize(("dtype", "called"), [(np.int8, "int8"), (np.int64, "int64"), (np.bool_, "bool")])
def test_integers_in_the_place_of_a_weight(refused, single, dtype, called):
    resave(single, add=lambda stored: {"model.norm.weight": stored["model.norm.weight"].astype(dtype)})
    refused(single, "model.safetensors", "model.norm.weight", f"stored as {called}")


@pytest.mark.parametrize(
    ("field", "value"),
    [("intermediate_size", 95), ("vocab_size", 98), ("num_key_value_heads", 1), ("head_dim", 32), ("hidden_size", 72)],
)
def test_config_disagrees_with_shapes(refused, single, field, value):
    set_keys(single, **{field: value})
    refused(single, "model.safetensors", "has shape", "config.json asks for")


def test_missing_and_unused_tensors(refused, single):
    set_keys(single, num_hidden_layers=3)
    refused(single, "src", "model.layers.2.input_layernorm.weight", "missing")
    set_keys(single, num_hidden_layers=1)
    refused(single, "model.safetensors", "model.layers.1.", "no place")


def test_missing_head_hints_at_tying(refused, single):
    refused(resave(single, drop=["lm_head.weight"]), "lm_head.weight", "tie_word_embeddings")


def test_index_names_a_tensor_that_the_shard_lacks(refused, src):
    shard = src / "model-00002-of-00002.safetensors"
    tensors = load_file(shard)
    lost = sorted(tensors)[0]
    del tensors[lost]
    save_file(tensors, shard)
    refused(src, "model.safetensors.index.json", lost, shard.name)


@pytest.mark.parametrize("listed", [True, False])
def test_tensor_that_the_index_does_not_place(refused, src, listed):
    first, second = (src / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    tensors, other = load_file(second), load_file(first)
    name = sorted(other)[0] if listed else "stowaway"
    save_file({**tensors, name: np.zeros(3, np.float32)}, second)
    refused(src, second.name, name, "stored twice" if listed else "does not list")


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 1}, {"a": None}])
def test_malformed_index(refused, src, weight_map):
    (src / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(src, "model.safetensors.index.json", "weight_map")


def test_tied_head_that_differs(refused, tmp_path):
    src = tiny_checkpoint(tmp_path / "src", tie_word_embeddings=True)
    resave(src, add=lambda stored: {"lm_head.weight": stored["model.embed_tokens.weight"] + 1})
    refused(src, "config.json", "tie_word_embeddings", "lm_head.weight")


def test_converted_folder_is_no_source(single, capsys):
    out = single.parent / "out"
    assert main([str(single), str(out)]) == 0
    assert main([str(out), str(single.parent / "again")]) == 2
    assert "converted folder already" in capsys.readouterr().err


def test_out_inside_the_source(single, capsys):
    assert main([str(single), str(single / "out")]) == 2
    assert main([str(single), str(single), "--overwrite"]) == 2
    assert "inside the source" in capsys.readouterr().err


def test_verify_without_transformers(single, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main([str(single), str(single.parent / "out"), "--verify", "logits"]) == 2
    assert "--verify logits compares with transformers, and torch and transformers is not" in capsys.readouterr().err
    assert not (single.parent / "out").exists()


def test_unknown_dtype_or_verification(single):
    with pytest.raises(ValueError, match=r"dtype='int4': expected"):
        load_folder(single, "int4")


def test_unedited_checkpoint_converts(single):
    """The refusals above are due to their edits."""
    assert main([str(single), str(single.parent / "out")]) == 0
