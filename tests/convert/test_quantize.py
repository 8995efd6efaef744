"""``jspec-convert --quantize``: what is rounded and what is not, what --verify says, and what is refused."""

import json
import shutil

import numpy as np
import pytest
import tiny_heads
from heads import VARIANTS, random_head
from safetensors.numpy import load_file
from stored_params import with_values_apart
from tiny import ARCHITECTURES, tiny_checkpoint, write_weights

from convert import Mismatch, Refusal, check, convert, load_draft, load_folder, read_draft_config
from convert.checkpoint import LazyArray, save_params
from convert.cli import main
from convert.manifest import write_manifest
from convert.verify import compare, jspec_logits
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.converted.orbax import stored_arrays
from jspec.checkpoints.export import export_draft
from jspec.checkpoints.files.folder import Folder
from jspec.commands.demo import FAMILY
from jspec.models.params import abstract_params, build, flat_params
from jspec.models.quantization import quantize
from jspec.quantization.formats import known_format

KINDS = ("int8", "fp8", "int4")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture(scope="module", params=KINDS)
def family(tmp_path_factory, request):
    """The shipped target, quantised, and in what."""
    folder = tmp_path_factory.mktemp("family") / request.param
    convert(FAMILY / "target", folder, quantize=request.param)
    return folder, request.param


def rewrite(folder, **changes):
    """Put other arrays into a converted folder, or leave out those that are None, and sign it anew."""
    params = {name: array.read() for name, array in stored_arrays(Folder(folder), "params").items()}
    manifest = json.loads((folder / "manifest.json").read_text())
    params = {name: array for name, array in {**params, **changes}.items() if array is not None}
    shutil.rmtree(folder / "params")
    save_params(folder / "params", {n: LazyArray(a.shape, a.dtype, lambda a=a: a, a.shape) for n, a in params.items()})
    write_manifest(folder, {name: manifest[name] for name in ("dtype", "quantization")})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_linear_maps_alone_are_quantised(tmp_path, out, architecture, kind, tied):
    """Linear maps and the output head, which a tied embedding is; norms, biases, positions, routers, small maps, betas and
    decays of gated delta nets, and other embeddings stay."""
    src = tiny_checkpoint(tmp_path / "src", architecture, tie_word_embeddings=tied, shards=2)
    report = convert(src, out, quantize=kind, dtype="bfloat16")
    found = load_folder(out)[0]
    assert (report.dtype, report.quantization) == ("bfloat16", found.formats)
    assert [note for note in report.notes if "weights that are not quantised are rounded to bfloat16" in note]
    original, (config, params) = load_folder(src)[1], load_folder(out)
    original = with_values_apart(original, config)
    assert config == load_folder(src)[0].with_quantization(kind) == Checkpoint.open(out).target_config
    assert report.parameters == config.num_parameters == sum(array.size for array in original.values())
    assert {n: (a.shape, a.dtype) for n, a in params.items()} == {
        n: (leaf.shape, leaf.dtype) for n, leaf in abstract_params(config, "bfloat16").items()
    }
    stored = config.stored_params()
    for name, array in original.items():
        kept = any(part in name for part in ("positions", "router", "layer_inputs", ".inputs.", "shared_gate", ".ba."))
        rounded = array.ndim == 2 and not kept and (name != "embedding" or tied)
        if not rounded:
            np.testing.assert_array_equal(params[name], array.astype(params[name].dtype))
            continue
        scale = "embedding_scale" if name == "embedding" else f"{name.removesuffix('weight')}scale"
        form = stored[name].form.name
        assert form == config.quantization_of("head" if name == "embedding" else name.removesuffix(".weight"))
        for found, expected in zip((params[name], params[scale]), quantize(array, form), strict=True):
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_an_output_head_is_rounded_once(tmp_path, out, stored):
    """From the numbers on disk, whatever the rest is kept in; and loading does not change it."""
    src = tiny_checkpoint(tmp_path / "src", dtype=stored)
    convert(src, out, quantize="int8")
    weight = load_file(src / "model.safetensors")["lm_head.weight"]
    for dtype in ("float32", "bfloat16"):
        params = load_folder(out, dtype)[1]
        np.testing.assert_array_equal(params["head.weight"], quantize(weight, "int8")[0])
        assert (params["head.weight"].dtype, params["head.scale"].dtype) == (np.int8, np.float32)
        assert params["norm.weight"].dtype.name == dtype


@pytest.mark.parametrize("kind", KINDS)
def test_from_the_command_line(src, out, capsys, kind):
    assert main([str(src), str(out), "--quantize", kind, "--verify", "shapes"]) == 0
    printed = capsys.readouterr().out
    formats, apart = ("int8 and int4", 2) if kind == "int4" else (kind, 0)
    assert f"shapes verified: {24 + 2 * apart} params" in printed
    assert f"{formats} weights verified: {9 + apart} params are the source's, rounded once" in printed
    assert f"21 tensors, 74,176 parameters in {formats} and float32" in printed
    assert ("attention.values of 2 layers are stored in int8, because int4 costs most there" in printed) is bool(apart)
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["dtype"], manifest["quantization"], manifest["parameter_count"]) == ("float32", kind, 74176)
    assert main(["--check", str(out)]) == 0
    for path in (out / "params").glob("**/layers.1.mlp.down.scale/0*"):
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
        assert check(out) == [f"{path}: damaged, its SHA-256 does not match"]
        break
    else:
        pytest.fail("no file of a scale")


def test_dry_run(src, out, capsys):
    assert main([str(src), "--dry-run", "--quantize", "fp8", "--dtype", "bfloat16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [key] = [line for line in lines if line.startswith("model.layers.1.self_attn.k_proj.weight ")]
    assert key.endswith("layers.1.attention.qkv.weight[64:96]  [32, 64]  float32 -> float8_e4m3fn")
    [embedding] = [line for line in lines if line.startswith("model.embed_tokens.weight ")]
    assert embedding.endswith("float32 -> bfloat16")
    assert lines[-1] == "21 tensors -> 15 params and 9 scales, 74,176 parameters, bfloat16"
    assert not out.exists()


def test_verify_logits(src, out, capsys):
    pytest.importorskip("torch")
    assert main([str(src), str(out), "--quantize", "int8", "--verify", "logits"]) == 0
    printed = capsys.readouterr().out
    assert "logits of the original weights verified against transformers: KL divergence mean" in printed
    assert "KL(original || int8) mean" in printed
    assert "over 166 random tokens" in printed


def test_verify_logits_refuses_what_is_not_finite(src, out, monkeypatch):
    pytest.importorskip("torch")

    def load(folder, dtype=None):
        config, params = load_folder(folder, dtype)
        if config.quantization:
            params["layers.0.attention.qkv.scale"][3] = np.inf
        return config, params

    monkeypatch.setattr("convert.verify.load_folder", load)
    with pytest.raises(Mismatch, match="logits of the int8 weights are not finite"):
        convert(src, out, quantize="int8", verify="logits")
    assert not out.exists()


@pytest.mark.parametrize("name", ["head.weight", "layers.1.mlp.gate_up.scale"])
def test_verify_sees_one_changed_bit(src, out, monkeypatch, name):
    def load(folder, dtype=None):
        config, params = load_draft(folder, dtype)
        params[name].view(np.uint8).flat[5] ^= 1
        return config, params

    monkeypatch.setattr("convert.verify.load_draft", load)
    with pytest.raises(Mismatch, match=f"parameter '{name}' is not that of the source, quantised"):
        convert(src, out, quantize="int8", verify="shapes")
    assert not out.exists()


def test_how_far_the_distribution_moves(family):
    """Of the shipped target: little in int8, ten times as much in fp8, which has four significant bits."""
    rng = np.random.default_rng(0)
    sequences = [rng.integers(2048, size=64) for _ in range(4)]
    (config, original), (quantised, params) = (load_folder(path, "float32") for path in (FAMILY / "target", family[0]))
    expected = jspec_logits(build(config, original), sequences)
    found = compare(expected, jspec_logits(build(quantised, params), sequences))
    low, high, top1 = {"int8": (1e-4, 2e-3, 0.95), "fp8": (4e-3, 4e-2, 0.85), "int4": (1e-2, 0.5, 0.5)}[family[1]]
    assert low < found.mean_kl < high
    assert found.mean_kl < found.max_kl < 20 * high
    assert found.top1 > top1
    assert found.positions == 4 * 64


def test_how_many_bytes_are_left(family):
    folder, kind = family
    size = sum(path.stat().st_size for path in (folder / "params").rglob("*"))
    assert size < (0.36 if kind == "int4" else 0.57) * (FAMILY / "target" / "model.safetensors").stat().st_size


def test_a_pard_model_is_a_language_model(tmp_path, out):
    convert(tiny_heads.pard(tmp_path / "head"), out, quantize="fp8", verify="shapes")
    config, params = load_draft(out, "bfloat16")
    assert config == read_draft_config(out)
    assert config.decoder.quantization == Checkpoint.open(out).target_config.quantization == "fp8"
    assert params["layers.0.mlp.down.weight"].dtype == known_format("fp8").numbers


def dspark(folder):
    """A DSpark head with a gated Markov head and a confidence head, which is never quantised."""
    config = VARIANTS["dspark"]
    params = flat_params(random_head(config))
    export_draft(folder, config, params, target_name="target", dtype="float32", layout="speculators")
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "make",
    [
        *(getattr(tiny_heads, n) for n in ("eagle", "eagle3", "p_eagle", "speculators", "mlp_speculator", "medusa")),
        dspark,
    ],
)
def test_linear_maps_of_a_head_are_quantised(tmp_path, out, make, kind):
    """Linear maps and output heads; norms, biases, embeddings, the confidence head and the draft vocabulary stay."""
    src = make(tmp_path / "head")
    report = convert(src, out, quantize=kind, verify="shapes", dtype="bfloat16")
    assert report.quantization == kind
    (plain, original), (config, params) = load_draft(src, "float32"), load_draft(out)
    assert config == plain.with_quantization(kind) == read_draft_config(out)
    assert {n: (a.shape, a.dtype) for n, a in params.items()} == {
        n: (leaf.shape, leaf.dtype) for n, leaf in abstract_params(config, "bfloat16").items()
    }
    stored = config.stored_params()
    for name, array in original.items():
        if array.ndim < 2 or "embedding" in name or name == "confidence.weight":
            np.testing.assert_array_equal(params[name], array.astype(params[name].dtype))
            continue
        scale = f"{name.removesuffix('weight')}scale"
        for found, expected in zip((params[name], params[scale]), quantize(array, stored[name].form.name), strict=True):
            np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))


def test_a_quantised_head_is_not_exported(tmp_path):
    config = VARIANTS["eagle3-int8"]
    with pytest.raises(ValueError, match="quantization='int8': expected None: these layouts have no scales"):
        export_draft(tmp_path, config, flat_params(random_head(config)), target_name="target")


def test_unknown_quantizations_are_refused(src, out, capsys):
    with pytest.raises(ValueError, match="quantize='int2': expected None or one of int8, fp8, int4"):
        convert(src, out, quantize="int2")
    for arguments in ([str(src), str(out), "--quantize", "int2"], ["--check", str(out), "--quantize", "int8"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
    assert "invalid choice: 'int2'" in capsys.readouterr().err


def test_a_converted_folder_is_not_quantised_again(src, out):
    convert(src, out)
    with pytest.raises(Refusal, match="is a converted folder already; give the Hugging Face folder"):
        convert(out, out.parent / "again", quantize="int8")


def test_infinity_is_refused(tmp_path, out):
    src = tiny_checkpoint(tmp_path / "src")
    tensors = load_file(src / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = np.inf
    write_weights(src, tensors)
    with pytest.raises(Refusal, match=r"'layers\.1\.mlp\.down\.weight' has NaN or infinity, which int8 weights cannot"):
        convert(src, out, quantize="int8")
    assert not out.exists()
    convert(src, out)


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("layers.0.attention.out.scale", None, "parameter 'layers.0.attention.out.scale' is missing"),
        ("layers.0.mlp.down.scale", np.zeros(64, np.float32), "'layers.0.mlp.down.scale' has a scale that is 0 or no"),
        ("head.scale", np.full(97, np.nan, np.float32), "'head.scale' has a scale that is 0 or no number"),
        ("head.scale", np.ones(96, np.float32), r"'head.scale' has shape \[96\], but its config asks for \[97\]"),
        ("head.scale", np.ones(97, np.float16), "'head.scale' is stored as float16, expected float32"),
        ("head.weight", np.ones((97, 64), np.float32), "'head.weight' is stored as float32, expected int8"),
        ("norm.scale", np.ones(64, np.float32), "'norm.scale' is unknown"),
    ],
)
def test_badly_quantised_folders_are_refused(src, out, name, array, words):
    convert(src, out, quantize="int8")
    rewrite(out, **{name: array})
    with pytest.raises(Refusal, match=words):
        load_folder(out)


def test_a_manifest_of_another_quantization_is_refused(src, out):
    convert(src, out, quantize="int8")
    manifest = json.loads((out / "manifest.json").read_text())
    write_manifest(out, {"dtype": manifest["dtype"], "quantization": "fp8"})
    with pytest.raises(Refusal, match=r"is stored as int8, expected float8_e4m3fn"):
        load_folder(out)
    write_manifest(out, {"dtype": manifest["dtype"], "quantization": "nf4"})
    with pytest.raises(
        Refusal, match=r"manifest\.json: quantization='nf4': expected one of None, int8, fp8, int4, fp8_block; convert"
    ):
        load_folder(out)
