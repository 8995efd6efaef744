"""Linear maps in MXFP4 and MXFP8 of compressed-tensors: read as its own library reads them, kept, and refused where they are
wrong."""

import numpy as np
import pytest
from block_checkpoints import KEPT_CODES, MXFP4, Kind, block_checkpoint, stored_as
from fp8_checkpoints import DOWN, FP8, changed, raw_tensor
from packed_weights import MAGNITUDES, mxfp4_config
from stored_heads import stored_head
from stored_params import assert_same, assert_stands_for, refuses, rewrite
from tiny import tiny_checkpoint

from convert import Refusal, convert, load_draft, load_folder
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.quantized.e2m1 import E2M1Weight
from jspec.quantization.formats import KINDS, known_format
from jspec.quantization.weight import Weight


def read_with_numpy(packed: np.ndarray, scale: np.ndarray, first_is_high: bool = False) -> np.ndarray:
    """What a weight stands for in float64, from the definition: the sign and the magnitude of a code, and an exponent."""
    halves = (packed >> 4, packed & 15) if first_is_high else (packed & 15, packed >> 4)
    codes = np.stack(halves, axis=-1).reshape(len(packed), -1)
    numbers = np.array(MAGNITUDES)[codes & 7] * np.where(codes < 8, 1, -1)
    return np.ldexp(numbers, scale.astype(int).repeat(32, axis=1) - 127)


def scheme():
    library = pytest.importorskip("compressed_tensors")
    return library.quantization.QuantizationScheme(targets=["Linear"], **library.quantization.quant_scheme.MXFP4A16)


def decompressed(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """What a weight stands for by compressed-tensors, float32; it is exact in bfloat16, which that library gives."""
    torch = pytest.importorskip("torch")
    compressor = pytest.importorskip("compressed_tensors.compressors.mxfp4").MXFP4PackedCompressor
    parts = {"weight_packed": torch.from_numpy(packed), "weight_scale": torch.from_numpy(scale)}
    return compressor.decompress(parts, scheme())["weight"].float().numpy()


def by_compressed_tensors(weight: np.ndarray):
    """A weight as the library itself rounds and stores it, and as it reads it."""
    torch = pytest.importorskip("torch")
    compressor = pytest.importorskip("compressed_tensors.compressors.mxfp4").MXFP4PackedCompressor
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    wide, how = torch.from_numpy(weight), scheme()
    groups = wide.reshape(len(weight), -1, 32)
    scale, _ = utils.calculate_qparams(groups.amin(-1), groups.amax(-1), how.weights)
    stored = compressor.compress({"weight": wide, "weight_scale": scale}, how)
    parts = {f".{name}": part.numpy() for name, part in stored.items()}
    return parts, decompressed(parts[".weight_packed"], parts[".weight_scale"])


def test_weights_are_those_that_compressed_tensors_reads(tmp_path):
    wide = tiny_checkpoint(tmp_path / "src-wide")
    src = stored_as(tmp_path / "src", wide, Kind(mxfp4_config(), by_compressed_tensors, ""))
    config, params = load_folder(src)
    assert config.quantization == "mxfp4"
    assert_stands_for(params, config, load_folder(wide)[1])
    packed, scale = (raw_tensor(src, DOWN + end) for end in (".weight_packed", ".weight_scale"))
    found = [params[f"layers.1.mlp.down.{part}"] for part in ("weight", "scale")]
    assert len(np.unique(scale)) > 1
    np.testing.assert_array_equal(found[1], scale)
    weight = Weight(*found, form=known_format("mxfp4"), inputs=2 * packed.shape[1]).dequantize()
    np.testing.assert_array_equal(weight, read_with_numpy(packed, scale))
    assert (weight != read_with_numpy(packed, scale, first_is_high=True)).mean() > 0.5
    plain = read_with_numpy(packed, np.full_like(scale, 127)) * scale.repeat(32, axis=1)
    assert (weight != plain)[plain != 0].all()


def mxfp8_by_compressed_tensors(weight: np.ndarray):
    """A weight in MXFP8 as the library itself rounds and stores it, and as it reads it, which is exact in bfloat16."""
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("compressed_tensors.quantization")
    compressor = pytest.importorskip("compressed_tensors.compressors.mxfp8").MXFP8QuantizationCompressor
    how = library.QuantizationScheme(targets=["Linear"], **library.quant_scheme.MXFP8A16)
    wide = torch.from_numpy(weight)
    groups = wide.reshape(len(weight), -1, 32)
    scale, _ = library.utils.calculate_qparams(groups.amin(-1), groups.amax(-1), how.weights)
    stored = compressor.compress({"weight": wide, "weight_scale": scale}, how)
    read = compressor.decompress(stored, how)["weight"].float().numpy()
    numbers = stored["weight"].view(torch.uint8).numpy().view(FP8)
    return {".weight": numbers, ".weight_scale": stored["weight_scale"].numpy()}, read


def test_mxfp8_is_what_compressed_tensors_reads(tmp_path):
    wide = tiny_checkpoint(tmp_path / "src-wide")
    kind = KEPT_CODES["mxfp8"]._replace(store=mxfp8_by_compressed_tensors)
    config, params = load_folder(stored_as(tmp_path / "src", wide, kind))
    assert config.quantization == "mxfp8"
    assert len(np.unique(params["layers.1.mlp.down.scale"])) > 1
    assert_stands_for(params, config, load_folder(wide)[1])


def test_every_code_with_every_scale(tmp_path):
    """Numbers that are subnormal in float32 among them, and groups of zeros, whose scale llm-compressor writes as 0."""
    src = block_checkpoint(tmp_path / "src", MXFP4, hidden_size=128, num_hidden_layers=1, head_dim=32)
    name = "model.layers.0.mlp.down_proj"
    packed, scale = (raw_tensor(src, name + end).copy() for end in (".weight_packed", ".weight_scale"))
    packed[:] = np.arange(packed.size, dtype=np.uint8).reshape(packed.shape)
    scale.reshape(-1)[:] = np.arange(scale.size) % (KINDS["mxfp4"].largest_power + 1)
    packed[0, :16], packed[0, 16:32], scale[0, :2] = 0, 0x80, 0
    changed(src, **{f"{name}.weight_packed": packed, f"{name}.weight_scale": scale})
    assert set(scale.flat) == set(range(KINDS["mxfp4"].largest_power + 1))
    _, params = load_folder(src)
    arrays = (params[f"layers.0.mlp.down.{part}"] for part in ("weight", "scale"))
    found = Weight(*arrays, form=known_format("mxfp4"), inputs=96).dequantize()
    np.testing.assert_array_equal(np.float64(found), read_with_numpy(packed, scale))
    np.testing.assert_array_equal(found, decompressed(packed, scale))
    np.testing.assert_array_equal(np.signbit(found[0, :64]), [False] * 32 + [False, True] * 16)


def test_conversion_keeps_every_bit(tmp_path, monkeypatch):
    """And a scale that is none is refused when the folder is read again."""
    src, out = block_checkpoint(tmp_path / "src", MXFP4), tmp_path / "out"
    report = convert(src, out, verify="shapes")
    assert report.quantization == "mxfp4"
    assert any("params are the source's, as they are stored" in note for note in report.notes)
    assert_same(load_folder(src), load_folder(out))

    scales = raw_tensor(src, f"{DOWN}.weight_scale").copy()
    scales[-1, -1] = 134
    changed(src, **{f"{DOWN}.weight_scale": scales})
    with monkeypatch.context() as patched:
        patched.setattr(E2M1Weight, "factors", lambda *_: None)  # which refuses such a scale
        convert(src, tmp_path / "damaged")
    with pytest.raises(Refusal, match=r"'layers\.1\.mlp\.down\.scale' has the scale 134: expected at most 133"):
        load_folder(tmp_path / "damaged")


def test_draft_heads_stay_as_they_are_stored(tmp_path):
    src, wide = stored_head(tmp_path / "head", "eagle3", MXFP4)
    config, params = load_draft(src, "float32")
    assert config.formats == "mxfp4"
    assert_stands_for(params, config, load_draft(wide, "float32")[1])


@pytest.mark.parametrize("form", [None, "mixed-precision", "mxfp4-pack-quantized"])
def test_the_format_of_a_group(tmp_path, form):
    """Which compressed-tensors writes for each group, and for all of them if it is one."""
    config = mxfp4_config()
    config["config_groups"]["group_0"]["format"], config["format"] = config["format"], form
    src = block_checkpoint(tmp_path / "src", MXFP4._replace(config=config))
    assert Checkpoint.open(src).target_config.quantization == "mxfp4"


def test_groups_have_to_fill_the_inputs(tmp_path):
    src = tiny_checkpoint(tmp_path / "src", intermediate_size=80)
    rewrite(src, quantization_config=mxfp4_config())
    packed, scale = np.zeros((64, 40), np.uint8), np.zeros((64, 3), np.uint8)
    changed(src, **{f"{DOWN}.weight": None, f"{DOWN}.weight_packed": packed, f"{DOWN}.weight_scale": scale})
    refuses(src, f"'{DOWN}' has 80 input features: expected a multiple of 32, because so many share a scale")
