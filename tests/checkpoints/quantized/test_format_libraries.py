"""Weights as the libraries of their formats write and read them, beside jspec's own reading, number by number.

What is random here is what is stored: codes, zeros and scales. So a reading that takes bits in another order differs.

| format | beside |
|---|---|
| NVFP4 and MXFP8 of NVIDIA Model Optimizer | ``nvidia-modelopt``, its own library, of the extra ``parity`` |
| AWQ | ``compressed-tensors``, which converts AutoAWQ's checkpoints |
| NVFP4, both layouts | ``compressed-tensors``, which converts Model Optimizer's checkpoints to its own |
| GPTQ with both kinds of zeros and AWQ, as AutoRound writes them | ``auto-round``, its own library, where it is installed |

These are no part of the extra: ``auto-round`` needs ``accelerate``, ``datasets``, ``pandas`` and ``pyarrow``, which are
260 MB and change what transformers does; ``autoawq`` needs those and ``triton``; ``gptqmodel`` has no wheels, so it would
have to be compiled. Libraries of formats run in processes of their own, because importing them changes torch."""

import importlib.util

import ml_dtypes
import numpy as np
import pytest
from children import run_library
from held_tensors import read
from packed_weights import (
    auto_round_config,
    awq_config,
    bytes_config,
    gptq_config,
    model_optimizer_config,
    nvfp4_config,
)

OUTPUTS, INPUTS, GROUP = 64, 96, 32
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def library(name: str, script: str, folder, **arrays: np.ndarray) -> dict[str, np.ndarray]:
    """What a script of a library saves, which finds ``arrays`` in ``given`` and puts tensors into ``found``; skips if the
    library is not installed."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    np.savez(folder / "given.npz", **arrays)
    around = (
        "import numpy as np, torch\n"
        "given = {n: torch.from_numpy(a) for n, a in np.load('given.npz').items()}\nfound = {}\n"
        f"{script}\n"
        "np.savez('found.npz', **{n: t.detach().numpy() for n, t in found.items()})\n"
    )
    run_library(around, folder)
    return dict(np.load(folder / "found.npz"))


MODEL_OPTIMIZER = """
from modelopt.torch.quantization.qtensor import MXFP8QTensor, NVFP4QTensor
stored, scale, overall = NVFP4QTensor.quantize(given["weight"].clone(), 16)
stored._quantized_data = codes = torch.where(given["any"] > 0, stored._quantized_data, given["codes"])
found["nvfp4"] = stored.dequantize(torch.float32, scale=scale, double_scale=overall, block_sizes={-1: 16})
found |= {"nvfp4.weight": codes, "nvfp4.weight_scale": scale.view(torch.uint8), "nvfp4.weight_scale_2": overall}
stored, scale = MXFP8QTensor.quantize(given["other_weight"].clone())
scale = torch.where(given["any_scale"] > 0, scale, given["scale"])
found["mxfp8"] = stored.dequantize(torch.float32, scale=scale)
found |= {"mxfp8.weight": stored._quantized_data.view(torch.uint8), "mxfp8.weight_scale": scale}
"""


@pytest.fixture(scope="module")
def of_model_optimizer(tmp_path_factory) -> dict[str, np.ndarray]:
    """The tensors of a map in ``nvfp4`` and of one in ``mxfp8``, and what the library reads of them.

    Half the codes of the one and half the scales of the other are random, and a group of each is of zeros."""
    rng, given = np.random.default_rng(0), {}
    for name, group in (("weight", 16), ("other_weight", 32)):
        given[name] = rng.normal(0, 0.05, (OUTPUTS, INPUTS)).astype(np.float32)
        given[name][3, group : 2 * group] = 0
    codes = rng.integers(256, size=(OUTPUTS, INPUTS // 2), dtype=np.uint8)
    scale = rng.integers(20, 135, (OUTPUTS, INPUTS // 32), dtype=np.uint8)
    given |= {"codes": codes, "any": rng.integers(2, size=codes.shape)}
    given |= {"scale": scale, "any_scale": rng.integers(2, size=scale.shape)}
    given["any_scale"][3, 1] = 1
    return library("modelopt", MODEL_OPTIMIZER, tmp_path_factory.mktemp("model_optimizer"), **given)


def test_nvfp4_is_that_of_model_optimizer(of_model_optimizer):
    found = of_model_optimizer
    parts = {end: found[f"nvfp4{end}"] for end in (".weight", ".weight_scale", ".weight_scale_2")}
    parts[".weight_scale"] = parts[".weight_scale"].view(FP8)
    assert len(np.unique(found["nvfp4"])) > 100
    np.testing.assert_array_equal(read(model_optimizer_config(), parts), found["nvfp4"])


def test_codes_in_bytes_are_those_of_compressed_tensors():
    """W4A8, of which the library takes a byte for each code of four bits."""
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("compressed_tensors.quantization")
    compressor = pytest.importorskip("compressed_tensors.compressors.naive_quantized").IntQuantizationCompressor
    how = library.QuantizationScheme(targets=["Linear"], **library.quant_scheme.W4A8)
    weight = torch.from_numpy(np.random.default_rng(0).normal(0, 0.05, (OUTPUTS, 256)).astype(np.float32))
    groups = weight.reshape(OUTPUTS, -1, 128)
    scale, zero = library.utils.calculate_qparams(groups.amin(-1), groups.amax(-1), how.weights)
    given = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    stored = compressor.compress(given, how)
    parts = {f".{name}": tensor.numpy() for name, tensor in stored.items() if "zero_point" not in name}
    assert len(np.unique(parts[".weight"])) == 16
    theirs = compressor.decompress(stored, how)["weight"].float().numpy()
    np.testing.assert_array_equal(read(bytes_config(), parts, theirs.shape), theirs)


def test_mxfp8_is_that_of_model_optimizer(of_model_optimizer):
    found = of_model_optimizer
    assert found["mxfp8.weight_scale"][3, 1] == 0  # as the library writes it of a group of zeros
    parts = {".weight": found["mxfp8.weight"].view(FP8), ".weight_scale": found["mxfp8.weight_scale"]}
    np.testing.assert_array_equal(read(model_optimizer_config("MXFP8", group_size=32), parts), found["mxfp8"])


def test_nvfp4_means_the_same_in_both_layouts():
    """The number of a whole weight is the other one's reciprocal, which rounds it once."""
    torch = pytest.importorskip("torch")
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters")
    rng = np.random.default_rng(1)
    parts = {
        ".weight": rng.integers(256, size=(OUTPUTS, INPUTS // 2), dtype=np.uint8),
        ".weight_scale": rng.uniform(1, 448, (OUTPUTS, INPUTS // 16)).astype(FP8),
        ".weight_scale_2": np.float32([3e-4]),
    }
    given = {
        f"map{end}": torch.from_numpy(a.view(np.uint8)).view(torch.float8_e4m3fn)
        if a.dtype == FP8
        else torch.from_numpy(a)
        for end, a in parts.items()
    }
    theirs = converters.ModelOptNvfp4Converter(targets=["map"]).process(given)
    other = {name.removeprefix("map"): tensor for name, tensor in theirs.items()}
    assert other.keys() == {".weight_packed", ".weight_scale", ".weight_global_scale"}
    converted = {
        end: t.view(torch.uint8).numpy().view(FP8) if "float8" in str(t.dtype) else t.numpy()
        for end, t in other.items()
    }
    np.testing.assert_allclose(
        read(nvfp4_config(), converted), read(model_optimizer_config(), parts), rtol=2**-22, atol=0
    )


def words(rng, *shape: int) -> np.ndarray:
    return rng.integers(-(2**31), 2**31, shape, dtype=np.int32)


def test_awq_is_that_of_compressed_tensors():
    """In words of any bits, so that every place of a code in a word counts."""
    torch = pytest.importorskip("torch")
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters")
    rng = np.random.default_rng(2)
    parts = {
        ".qweight": words(rng, INPUTS, OUTPUTS // 8),
        ".qzeros": words(rng, INPUTS // GROUP, OUTPUTS // 8),
        ".scales": rng.uniform(0.01, 0.1, (INPUTS // GROUP, OUTPUTS)).astype(np.float16),
    }
    converter = converters.AutoAWQConverter(group_size=GROUP)
    given = (torch.from_numpy(parts[end]) for end in (".qweight", ".scales", ".qzeros"))
    codes, scales, zeros = (tensor.numpy() for tensor in converter._convert_gemm_module(*given))
    integers = codes.astype(np.float32) - np.repeat(zeros.astype(np.float32), GROUP, axis=1)
    wanted = integers * np.repeat(scales.astype(np.float32), GROUP, axis=1)
    assert len(np.unique(integers)) == 31
    np.testing.assert_array_equal(read(awq_config(group_size=GROUP), parts), wanted)


AUTO_ROUND = """
from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm
from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp
for bits in (4, 8):
    weight, scales, zeros = (given[f"{name} {bits}"] for name in ("weight", "scales", "zeros"))
    linear = torch.nn.Linear(*reversed(weight.shape), bias=False)
    layers = {}
    for module in (qlinear_torch, qlinear_torch_zp):
        layer = module.QuantLinear(bits, 32, linear.in_features, linear.out_features, False)
        layer.device, linear.weight.data = "cpu", weight.clone()
        layer.pack(linear, scales.float(), zeros, None, "cpu")
        name = module.__name__.rpartition(".")[2]
        layers[f"{name} {bits}"] = layer, layer(torch.eye(linear.in_features)).T
    if bits == 4:
        layer = WQLinear_GEMM.from_linear(
            linear, 4, 32, scales=scales.float().T.contiguous(), zeros=zeros.T.contiguous(), device="cpu"
        )
        layers["awq 4"] = layer, dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, 32).T
    for name, (layer, read) in layers.items():
        found[name] = read
        found |= {f"{name}.{end}": getattr(layer, end) for end in ("qweight", "qzeros", "scales")}
"""


def rounded(bits: int) -> dict[str, np.ndarray]:
    """A weight that codes of so many bits stand for exactly, with its scales and zeros ``[out, groups]``.

    No zero is 0, because the first version of GPTQ stores zeros less one, and AutoRound then loses it."""
    rng, last = np.random.default_rng(bits), 2**bits - 1
    zeros = rng.integers(1, last + 1, (OUTPUTS, INPUTS // GROUP))
    scales = np.float16(2.0 ** rng.integers(-6, 3, zeros.shape))  # in which the library's products in float16 are exact
    codes = rng.integers(last + 1, size=(OUTPUTS, INPUTS))
    wide = [np.repeat(array.astype(np.float32), GROUP, axis=1) for array in (zeros, scales)]
    return {"weight": (codes - wide[0]) * wide[1], "scales": scales, "zeros": zeros.astype(np.float32)}


@pytest.fixture(scope="module")
def of_auto_round(tmp_path_factory) -> dict[str, np.ndarray]:
    """``<packer> <bits>`` -> what AutoRound reads of the map that it has packed, and beside it its tensors."""
    given = {f"{name} {bits}": array for bits in (4, 8) for name, array in rounded(bits).items()}
    return library("auto_round_extension", AUTO_ROUND, tmp_path_factory.mktemp("auto_round"), **given)


PACKERS = {
    "auto_gptq": (auto_round_config("auto_round:auto_gptq"), "qlinear_torch_zp"),
    "gptqmodel": (auto_round_config("auto_round:gptqmodel"), "qlinear_torch"),
    "plain": (auto_round_config("auto_round"), "qlinear_torch"),
    "gptq": (gptq_config(group_size=GROUP), "qlinear_torch_zp"),
    "gptq v2": (gptq_config(group_size=GROUP, checkpoint_format="gptq_v2"), "qlinear_torch"),
    "auto_awq": (auto_round_config("auto_round:auto_awq"), "awq"),
    "awq": (awq_config(group_size=GROUP), "awq"),
}


@pytest.mark.parametrize(
    ("name", "bits"), [(name, bits) for name, (_, by) in PACKERS.items() for bits in ((4,) if by == "awq" else (4, 8))]
)
def test_gptq_and_awq_are_those_of_auto_round(of_auto_round, name, bits):
    config, packer = PACKERS[name]
    parts = {f".{end}": of_auto_round[f"{packer} {bits}.{end}"] for end in ("qweight", "qzeros", "scales")}
    theirs = of_auto_round[f"{packer} {bits}"]
    np.testing.assert_array_equal(theirs, rounded(bits)["weight"])
    np.testing.assert_array_equal(read({**config, "bits": bits}, parts), theirs)
