"""Quantised models in the formats of compressed-tensors, read again by jspec and by transformers."""

import json
import resource
import shutil

import numpy as np
import pytest
from block_checkpoints import KEPT_CODES, block_checkpoint
from fp8_checkpoints import changed, names_in, raw_tensor
from stored_params import logits
from tiny import tiny_checkpoint

from convert import Refusal, convert, export_quantized, load_folder
from convert.cli import main
from convert.compressed import MARK
from convert.verify import compare, transformers_logits
from jspec.config import QUANTIZATIONS
from jspec.config.model_fields import PLAIN_HEAD


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A tiny checkpoint in float32 whose maps have whole groups of inputs."""
    folder = tmp_path_factory.mktemp("wide")
    block_checkpoint(folder / "src", KEPT_CODES["packed"])
    out, rng = folder / "src-wide", np.random.default_rng(0)  # whose weights int4 holds, which others are not
    weights = {name: raw_tensor(out, name) for name in names_in(out)}
    noisy = {
        name: array + rng.normal(0, 0.1 * array.std(), array.shape).astype(array.dtype)
        for name, array in weights.items()
    }
    changed(out, **{name.replace(".", "__"): array for name, array in noisy.items() if array.ndim == 2})
    return out


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_the_weights_are_those_of_a_conversion(tmp_path, wide, kind):
    """As they are stored, but for the output head, which stays as it was."""
    out = export_quantized(wide, tmp_path / "out", kind)
    config, params = load_folder(out, "float32")
    assert (config.quantization, config.other_formats) == (kind, PLAIN_HEAD)
    converted = convert(wide, tmp_path / "converted", quantize=kind).out
    wanted = load_folder(converted, "float32")[1]
    for name, array in params.items():
        if name != "head.weight":
            np.testing.assert_array_equal(array, wanted[name], err_msg=name)
    np.testing.assert_array_equal(params["head.weight"], load_folder(wide, "float32")[1]["head.weight"])


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_transformers_has_the_same_logits(tmp_path, wide, kind):
    """But for int4, whose numbers it rounds to the bfloat16 of their scales."""
    pytest.importorskip("compressed_tensors")
    out = export_quantized(wide, tmp_path / "out", kind)
    rng = np.random.default_rng(0)
    theirs = transformers_logits(out, [rng.integers(97, size=length) for length in (5, 33)])
    comparison = compare(theirs, logits(out))
    assert comparison.mean_kl < 1e-5 if kind == "int4" else comparison.exact
    assert compare(theirs, logits(wide)).mean_kl > 10 * comparison.mean_kl


def test_the_command_writes_it_and_may_replace_it(tmp_path, wide, capsys):
    args = [str(wide), str(tmp_path / "out"), "--quantize", "int4", "--format", "compressed-tensors"]
    assert main(args) == 0
    assert "int4 in the formats of compressed-tensors" in capsys.readouterr().out
    assert main(args) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*args, "--overwrite"]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 128
    assert config["ignore"] == ["lm_head"]


@pytest.mark.parametrize(
    "more", [[], ["--quantize", "int8", "--draft-vocabulary", "9"], ["--quantize", "int8", "--mtp"]]
)
def test_options_that_do_not_fit_are_refused(tmp_path, wide, more):
    with pytest.raises(SystemExit):
        main([str(wide), str(tmp_path / "out"), "--format", "compressed-tensors", *more])
    assert not (tmp_path / "out").exists()


def test_folders_of_others_are_not_replaced(tmp_path, wide):
    """Not even such as this would have written, and none is written inside the source, by whatever way there."""
    out = export_quantized(wide, tmp_path / "out", "int8")
    (out / MARK).unlink()
    with pytest.raises(Refusal, match="is no converted folder, so it is not overwritten"):
        export_quantized(wide, out, "int8", overwrite=True)
    (tmp_path / "link").symlink_to(wide)
    with pytest.raises(Refusal, match="lies inside the source folder"):
        export_quantized(wide, tmp_path / "link" / "out", "int8")


def test_a_full_disk_is_reported(tmp_path, wide, capsys):
    """safetensors tells of it in an error of its own."""
    (tmp_path / "place").mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, limits[1]))
    try:
        assert (
            main([str(wide), str(tmp_path / "place" / "out"), "--quantize", "int8", "--format", "compressed-tensors"])
            == 2
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capsys.readouterr().err
    assert "place/out: cannot be written (File too large at " in error
    assert error.endswith("so nothing was; free some space, or choose another place\n")
    assert not any((tmp_path / "place").iterdir())


def test_weights_that_are_quantised_or_not_finite_are_not_exported(tmp_path, wide):
    out = export_quantized(wide, tmp_path / "out", "int8")
    with pytest.raises(Refusal, match="its weights are quantised already"):
        export_quantized(out, tmp_path / "again", "int8")
    converted = convert(wide, tmp_path / "converted").out
    with pytest.raises(Refusal, match="is a converted folder already; give the Hugging Face folder"):
        export_quantized(converted, tmp_path / "again", "int8")
    narrow = tiny_checkpoint(tmp_path / "narrow")
    with pytest.raises(Refusal, match="has 64 inputs: expected a multiple of 128 for int4; without --format it can be"):
        export_quantized(narrow, tmp_path / "again", "int4")
    broken = shutil.copytree(wide, tmp_path / "nan")
    name = next(name for name in names_in(wide) if name.endswith("down_proj.weight"))
    weight = np.array(raw_tensor(wide, name))
    weight[0, 0] = np.nan
    changed(broken, **{name.replace(".", "__"): weight})
    with pytest.raises(Refusal, match=rf"tensor '{name}' has NaN or infinity"):
        export_quantized(broken, tmp_path / "again", "int8")
    assert not (tmp_path / "again").exists()
