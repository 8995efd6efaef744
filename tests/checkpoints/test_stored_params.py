"""Params that are read from a checkpoint one at a time."""

import gc
import io
import logging
import sys
import weakref

import numpy as np
import pytest
import tiny_heads
from fp8_checkpoints import fp8_checkpoint
from tiny import tiny_checkpoint

from convert import convert
from convert.folders import load_folder
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.huggingface.weights import SafeTensor
from jspec.checkpoints.tensors import params as stored_params
from jspec.checkpoints.tensors.params import StoredParams
from jspec.loading.modules import build_draft_module
from jspec.models import build

SHAPES = {"a": (2, 3), "b": (4,)}


def some_params() -> StoredParams:
    return StoredParams("folder", SHAPES, lambda name, index: np.ones(SHAPES[name], np.float32)[index])


@pytest.fixture(params=["safetensors", "latents", "converted", "fp8"])
def folder(request, tmp_path):
    architecture = "DeepseekV3ForCausalLM" if request.param == "latents" else "LlamaForCausalLM"
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint", architecture)
    if request.param in ("safetensors", "latents"):
        return checkpoint
    convert(checkpoint, tmp_path / "converted", quantize="fp8" if request.param == "fp8" else None)
    return tmp_path / "converted"


def test_names_and_shapes_are_known_before_anything_is_read(folder):
    config, params = Checkpoint.open(folder).language_model("float32")
    whole = load_folder(folder, "float32")[1]
    assert params.keys() == whole.keys()
    assert {name: array.shape for name, array in whole.items()} == dict(params.shapes)
    for name in params:
        np.testing.assert_array_equal(params[name], whole[name])
    assert build(config, params)


PARTS = [(), (slice(3, 7),), (slice(0, 1), slice(2, 4)), (slice(None), slice(1, None)), (slice(5, 5),)]


@pytest.mark.parametrize("index", PARTS, ids=str)
def test_a_part_of_an_array_is_that_part(folder, index):
    params = Checkpoint.open(folder).language_model(None)[1]
    for name, shape in params.shapes.items():
        own = index[: len(shape)]
        part, again = params.parts(name, [own, own])
        np.testing.assert_array_equal(part, params[name][own])
        np.testing.assert_array_equal(part, again)
        assert part.dtype == params[name].dtype


@pytest.mark.parametrize("make", [tiny_checkpoint, fp8_checkpoint])
def test_only_the_bytes_of_a_part_are_read(tmp_path, make, monkeypatch):
    """Queries, keys and values are tensors of their own: rows at both ends of all of them are rows of two."""
    make(tmp_path / "checkpoint")
    params, read = Checkpoint.open(tmp_path / "checkpoint").language_model()[1], []
    monkeypatch.setattr(SafeTensor, "read", lambda tensor: pytest.fail(f"{tensor.name} was read as a whole"))
    read_part = SafeTensor.read_part
    monkeypatch.setattr(
        SafeTensor, "read_part", lambda tensor, index: read.append(read_part(tensor, index)) or read[-1]
    )
    name = "layers.0.attention.qkv.weight"
    rows, columns = params.shapes[name]
    assert len(list(params.parts(name, [(slice(0, 4),), (slice(rows - 4, rows), slice(0, columns // 2))]))) == 2
    assert [part.size for part in read] == [4 * columns, 2 * columns]


def test_arrays_are_not_cached(folder):
    params = Checkpoint.open(folder).language_model("float32")[1]
    array = params["layers.0.mlp.gate_up.weight"]
    alive = weakref.ref(array)
    del array
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("kind", ["language model", "draft head"])
def test_a_module_is_built_of_a_few_arrays_at_a_time(tmp_path, monkeypatch, kind):
    """When an array is read, only few of those before it are in host memory, unless a device shares that memory."""
    config, params = Checkpoint.open(tiny_checkpoint(tmp_path / "target")).language_model("float32")
    target = build(config, params)
    if kind == "draft head":
        head = Checkpoint.open(tiny_heads.eagle3(tmp_path / "head", draft_vocab_size=97))
        config, params = head.config, head.params("float32")
    seen: list[weakref.ref] = []
    most, read = [0], params._read

    def reading(name, index):
        gc.collect()
        most[0] = max(most[0], sum(one() is not None for one in seen))
        array = read(name, index)
        seen.append(weakref.ref(array))
        return array

    monkeypatch.setattr(params, "_read", reading)
    if kind == "draft head":  # a cast, so that no device shares the memory of what was read
        build_draft_module(config, params, "bfloat16", target)
    else:
        build(config, params, "bfloat16")
    assert len(seen) >= len(params)
    assert 0 < most[0] < stored_params.AHEAD


def test_an_unknown_name_is_a_key_error():
    with pytest.raises(KeyError, match="c"):
        some_params()["c"]


def test_the_log_has_the_seconds_of_reading(caplog):
    caplog.set_level(logging.INFO, "jspec.loading")
    params = some_params()
    assert params["a"].shape == params["a"].shape
    assert not caplog.messages
    assert dict(params).keys() == SHAPES.keys()
    (message,) = caplog.messages
    assert message.startswith("folder: 0.0 GB of weights read in ")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_bar_is_shown_in_a_terminal_alone(monkeypatch, terminal):
    class Stream(io.StringIO):
        def isatty(self):
            return terminal

    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    bar = stored_params.tqdm
    monkeypatch.setattr(stored_params, "tqdm", lambda **options: bar(file=stream, mininterval=0, **options))
    dict(some_params())
    assert ("folder" in stream.getvalue()) == terminal
