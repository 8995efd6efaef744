"""What a conversion writes: the params bit for bit, the manifest, the dry run, and what --check finds."""

import hashlib
import json
import os
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from resaved import resave
from safetensors.numpy import load_file
from tiny import ARCHITECTURES, tiny_checkpoint, write_weights

import jspec
from convert import check, convert, load_folder
from convert.cli import main
from jspec.checkpoints.checkpoint import Checkpoint

TOKENIZER = {"tokenizer.json": '{"version": "1.0"}', "tokenizer_config.json": "{}", "chat_template.jinja": "{{ x }}"}


@pytest.fixture
def src(tmp_path):
    folder = tiny_checkpoint(tmp_path / "src", shards=2)
    for name, text in TOKENIZER.items():
        (folder / name).write_text(text)
    return folder


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and np.array_equal(a[name].view(np.uint8), b[name].view(np.uint8)) for name in a
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", None])
def test_converted_folder_equals_the_source(tmp_path, architecture, stored, dtype):
    src = tiny_checkpoint(tmp_path / "src", architecture, dtype=stored, shards=2)
    convert(src, tmp_path / "out", dtype=dtype)
    config, params = load_folder(src, dtype)
    own = config.param_dtypes()
    assert {array.dtype.name for name, array in params.items() if name not in own} == {dtype or stored}
    assert load_folder(tmp_path / "out")[0] == config
    assert same(load_folder(tmp_path / "out")[1], params)
    for cast in ("float32", "bfloat16"):
        if stored == "bfloat16" or dtype != "bfloat16":  # nothing was rounded on the way
            assert same(load_folder(tmp_path / "out", cast)[1], load_folder(src, cast)[1])


def test_rows_stack_in_order(src):
    tensors, (config, params) = {}, load_folder(src)
    for path in src.glob("*.safetensors"):
        tensors |= load_file(path)
    q, k, v = (tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    assert np.array_equal(params["layers.1.attention.qkv.weight"], np.concatenate([q, k, v]))
    gate, up = (tensors[f"model.layers.1.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    assert np.array_equal(params["layers.1.mlp.gate_up.weight"], np.concatenate([gate, up]))
    assert np.array_equal(params["embedding"], tensors["model.embed_tokens.weight"])
    assert config.num_heads != config.num_kv_heads


def test_plain_orbax_restores_it(tmp_path, src):
    convert(src, tmp_path / "out")
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "out" / "params")
    assert np.array_equal(
        tree["layers"]["0"]["attention"]["out"]["weight"], load_folder(src)[1]["layers.0.attention.out.weight"]
    )


@pytest.mark.parametrize(
    ("stored", "dtype", "expected", "note"),
    [
        ("float16", None, "float32", "float16 weights are kept exactly, as float32"),
        ("float16", "bfloat16", "bfloat16", "rounded to bfloat16"),
        ("float32", "bfloat16", "bfloat16", "rounded to bfloat16"),
        ("bfloat16", None, "bfloat16", None),
        ("bfloat16", "float32", "float32", None),
    ],
)
def test_dtype_is_printed(tmp_path, capsys, stored, dtype, expected, note):
    src = tiny_checkpoint(tmp_path / "src", dtype=stored)
    report = convert(src, tmp_path / "out", dtype=dtype)
    assert report.dtype == expected
    assert [note in text for text in report.notes] == ([True] if note else [])
    original = load_file(src / "model.safetensors")["model.norm.weight"]
    wanted = original.astype({"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[expected])
    assert np.array_equal(load_folder(tmp_path / "out")[1]["norm.weight"], wanted)


def test_one_wider_tensor_widens_all(tmp_path):
    src = tiny_checkpoint(tmp_path / "src", dtype="bfloat16")
    resave(src, add=lambda stored: {"model.norm.weight": stored["model.norm.weight"].astype(np.float32)})
    assert Checkpoint.open(src).hugging_face.exact_dtype == "float32"


def test_tied_and_redundant_tensors(tmp_path):
    src = tiny_checkpoint(tmp_path / "src", tie_word_embeddings=True)
    _, expected = load_folder(src)
    assert "head.weight" not in expected
    tensors = load_file(src / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    extra = {"lm_head.weight": embedding, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    write_weights(src, {**tensors, **extra})
    assert Checkpoint.open(src).hugging_face.ignored == sorted(extra)
    assert same(load_folder(src)[1], expected)
    del tensors["model.embed_tokens.weight"]
    write_weights(src, {**tensors, "lm_head.weight": embedding})  # stored under the head's name alone
    assert same(load_folder(src)[1], expected)
    assert main([str(src), str(tmp_path / "out")]) == 0
    assert same(load_folder(tmp_path / "out")[1], expected)


def test_nonfinite_numbers_are_reported_and_kept(tmp_path):
    src = tiny_checkpoint(tmp_path / "src")
    tensors = load_file(src / "model.safetensors")
    tensors["model.norm.weight"][3] = np.nan
    write_weights(src, tensors)
    [note] = convert(src, tmp_path / "out").notes
    assert "norm.weight" in note
    assert np.isnan(load_folder(tmp_path / "out")[1]["norm.weight"]).tolist().index(True) == 3


def test_the_manifest_describes_every_file(tmp_path, src, capsys):
    out = tmp_path / "out"
    assert main([str(src), str(out)]) == 0
    summary = capsys.readouterr().out
    assert "21 tensors" in summary
    assert "peak memory" in summary
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["source"] == {"path": str(src), "name_or_path": None, "revision": None}
    assert (manifest["dtype"], manifest["tensor_count"], manifest["parameter_count"]) == ("float32", 21, 74176)
    assert set(manifest["versions"]) == {"jspec", "jax", "flax", "orbax", "numpy"}
    assert manifest["versions"]["jspec"] == jspec.__version__
    written = {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert manifest["files"].keys() == written.keys() - {"manifest.json"}
    for name, digest in manifest["files"].items():
        assert digest == hashlib.sha256(written[name]).hexdigest()
    for name in ("config.json", *TOKENIZER):
        assert written[name] == (src / name).read_bytes()
    assert not any(str(tmp_path).encode() in content for name, content in written.items() if name != "manifest.json")


def test_check_names_every_flipped_byte(tmp_path, src, capsys):
    out = tmp_path / "out"
    convert(src, out)
    assert main(["--check", str(out)]) == 0
    files = [p for p in out.rglob("*") if p.is_file()]
    assert len(files) > 30
    for path in files:
        data = bytearray(path.read_bytes())
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
        capsys.readouterr()
        assert main(["--check", str(out)]) == 1
        printed = capsys.readouterr().out.splitlines()
        assert len(printed) == 1
        assert str(path) in printed[0]
        path.write_bytes(data)
    assert check(out) == []


def test_check_names_missing_extra_and_linked_files(tmp_path, src):
    out = tmp_path / "out"
    convert(src, out)
    (out / "tokenizer.json").unlink()
    (out / "extra").write_text("x")
    kept = (out / "config.json").read_bytes()
    (tmp_path / "config.json").write_bytes(kept)
    (out / "config.json").unlink()
    (out / "config.json").symlink_to(tmp_path / "config.json")
    assert check(out) == [
        f"{out}/tokenizer.json: missing",
        f"{out}/extra: not in the manifest",
        f"{out}/config.json: is a symbolic link that leaves the folder, which is refused",
    ]


def test_check_needs_a_converted_folder(src, capsys):
    assert main(["--check", str(src)]) == 2
    assert "manifest.json" in capsys.readouterr().err


def test_dry_run_prints_the_mapping(tmp_path, src, capsys):
    assert main([str(src), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "recognised: LlamaForCausalLM, 2 layers, vocabulary 97"
    assert len(lines) == 23
    [key] = [line for line in lines if line.startswith("model.layers.1.self_attn.k_proj.weight ")]
    assert key.split("-> ", 1)[1] == "layers.1.attention.qkv.weight[64:96]  [32, 64]  float32 -> float32"
    assert lines[-1] == "21 tensors -> 15 params, 74,176 parameters, float32"
    assert main([str(src), str(tmp_path / "out"), "--dry-run", "--dtype", "bfloat16"]) == 0
    assert "float32 -> bfloat16" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_reader_that_leaves_is_no_mistake(monkeypatch, src, capsys):
    """As in ``jspec-convert SRC --dry-run | head -1``."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main([str(src), "--dry-run"]) == 141
        monkeypatch.undo()
    assert capsys.readouterr().err == ""


def test_dry_run_finds_what_does_not_match(tmp_path, capsys):
    src = tiny_checkpoint(tmp_path / "src")
    tensors = load_file(src / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    wrong = {"model.layers.0.mlp.down_proj.weight": np.zeros((64, 95), np.float32)}
    write_weights(src, {**tensors, "stowaway": norm, **buffer, **wrong})
    assert main([str(src), "--dry-run"]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert "missing: model.norm.weight [64]" in printed
    assert "unused: stowaway [64] in model.safetensors" in printed
    assert "ignored: model.layers.0.self_attn.rotary_emb.inv_freq" in printed
    assert "wrong shape: model.layers.0.mlp.down_proj.weight [64, 95], expected [64, 96]" in printed


def test_dry_run_reads_headers_only(monkeypatch, src):
    def refuse(self):
        raise AssertionError("read a tensor")

    monkeypatch.setattr("jspec.checkpoints.huggingface.weights.SafeTensor.read", refuse)
    assert main([str(src), "--dry-run"]) == 0
    with pytest.raises(AssertionError):
        load_folder(src)


@pytest.mark.parametrize("arguments", [[], ["src"], ["src", "--check", "out"]])
def test_missing_arguments_print_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize(("stored", "dtype"), [("bfloat16", None), ("float32", "bfloat16")])
def test_verify_logits(tmp_path, capsys, stored, dtype):
    pytest.importorskip("torch")
    src = tiny_checkpoint(tmp_path / "src", dtype=stored)
    flags = ["--dtype", dtype] if dtype else []
    assert main([str(src), str(tmp_path / "out"), "--verify", "logits", *flags]) == 0
    assert "KL divergence mean" in capsys.readouterr().out


def test_verify_logits_fails_on_another_model(tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch")
    src, other = tiny_checkpoint(tmp_path / "src"), tiny_checkpoint(tmp_path / "other", seed=1)
    monkeypatch.setattr("convert.verify.load_folder", lambda path, dtype=None: load_folder(other, dtype))
    assert main([str(src), str(tmp_path / "out"), "--verify", "logits"]) == 1
    assert "KL divergence" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


MEMORY = """
    import resource, sys
    from convert import convert
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    small, out, large, *quantize = sys.argv[1:]
    options = {"quantize": quantize[0]} if quantize else {}
    convert(small, out + "-warm", **options)
    before = peak()
    report = convert(large, out, **options)
    assert report.peak_bytes == peak()
    print(report.peak_bytes - before)
"""


@pytest.mark.parametrize("quantize", [[], ["int8"]], ids=["as stored", "int8"])
def test_memory_is_that_of_a_few_tensors(tmp_path, quantize):
    """A 118 MB checkpoint whose largest parameter is 4 MB grows the process by far less than its size."""
    small = tiny_checkpoint(tmp_path / "small")
    sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 18, "vocab_size": 512}
    large = tiny_checkpoint(tmp_path / "large", shards=2, **sizes)
    size = sum(path.stat().st_size for path in large.glob("*.safetensors"))
    command = [sys.executable, "-c", textwrap.dedent(MEMORY), str(small), str(tmp_path / "out"), str(large), *quantize]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    grown = int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert size > 110e6
    assert grown < 0.4 * size
