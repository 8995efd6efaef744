"""Every tensor of a quantised map, in every format, broken in every way: refused by its name, and nothing is loaded.

So are tensors that change what a map computes and that no format here has: rotations, scales of inputs, low-rank parts."""

import json
import re

import numpy as np
import pytest
from block_checkpoints import KEPT, KEPT_CODES, KINDS, Kind, block_checkpoint
from fp8_checkpoints import FP8, compressed_tensors, fp8_checkpoint, names_in, raw_tensor, vllm_fp8
from mixed_checkpoints import MIXES, SHARED, Mix, mixed_checkpoint
from packed_weights import awq_config, gptq_config
from stored_params import assert_same
from tiers import in_tiers
from tiny import write_weights

from convert import Refusal, convert, load_folder

DOWN = "model.layers.1.mlp.down_proj"  # [64, 96] or larger
BY_CHANNEL = {
    "fp8 channel": compressed_tensors(),
    "int8 channel": compressed_tensors(format="int-quantized", weights__type="int"),
    "fp8 tensor": vllm_fp8(),
}
# Of several formats, and of each a map that not all others are like.
OF_MIXES = {
    "FP8 and NVFP4": "model.layers.1.self_attn.q_proj",
    "values in eight bits": "model.layers.1.mlp.gate_proj",  # in four, which are kept in eight
    "GPTQ": "model.layers.0.mlp.down_proj",
    "AutoRound": "model.layers.1.self_attn.k_proj",
    "Model Optimizer": "model.layers.0.mlp.up_proj",
    "plain shared experts": "model.layers.0.mlp.experts.0.gate_proj",  # the first, with which shared ones are compared
    "shared experts in eight bits": "model.layers.0.mlp.shared_expert.up_proj",
}
FORMATS = {**KINDS, **KEPT, **KEPT_CODES, **BY_CHANNEL, **{name: {**MIXES, **SHARED}[name] for name in OF_MIXES}}
# Of AWQ with a scale for each input, SVDQuant, older compressed-tensors with ``actorder: group``, QuaRot, SmoothQuant.
OTHERS = (
    *(".pre_quant_scale", ".input_quantizer._pre_quant_scale", ".svdquant_lora_a", ".weight_g_idx", ".hadamard_matrix"),
    *(".smooth_scale", ".weight_outliers"),
)
pytestmark = pytest.mark.filterwarnings("ignore:.*are dequantised as they are read:UserWarning")


def checkpoint(path, name: str):
    kind = FORMATS[name]
    if isinstance(kind, Mix):
        return mixed_checkpoint(path, kind)
    return block_checkpoint(path, kind) if isinstance(kind, Kind) else fp8_checkpoint(path, quantization=kind)


def broken(name: str, array: np.ndarray) -> dict[str, np.ndarray | None]:
    """A tensor in all ways that no format allows; None is none at all."""
    ways: dict[str, np.ndarray | None] = {"another dtype": array.astype(np.float32).astype(np.int16)}
    # Without these groups follow each other, as with -1 for each, numbers follow row after row, and inputs are multiplied by
    # nothing.
    optional = name.endswith((".g_idx", ".pre_quant_scale", ".weight_format"))
    optional |= name.endswith("_g_idx") and bool((array == -1).all())
    ways |= {} if optional else {"missing": None}
    ways |= {"a row less": array[:-1], "more axes": array[None, None, None]} if array.ndim else {}
    if array.ndim == 2 and array.shape[0] != array.shape[1]:
        ways["transposed"] = np.ascontiguousarray(array.T)
    if re.search("scale|absmax|SCB|nested_quant_map", name) and array.dtype.kind in "fV":
        of_zeros = () if "scale" not in name else (0,)  # which bitsandbytes takes
        for number in (np.nan,) if array.dtype == FP8 else (np.nan, np.inf, -np.inf, *of_zeros):
            wrong = array.copy()
            wrong.reshape(-1)[-1] = number
            ways[f"{number}"] = wrong
    return ways


TRIED = ["gptq", "packed zeros", "nvfp4", "mxfp8", "awq modelopt", "qwen", "int8 channel", "values in eight bits"]
TRIED += ["bitsandbytes nf4 twice", "bitsandbytes int8", "torchao int8", "plain shared experts"]


@pytest.mark.parametrize("name", in_tiers(FORMATS, test=TRIED))
def test_broken_tensors_are_refused_by_their_names(tmp_path, name):
    src, module = checkpoint(tmp_path / "src", name), OF_MIXES.get(name, DOWN)
    whole = {one: raw_tensor(src, one).copy() for one in names_in(src)}
    cases = {
        f"{end} {way}": (module + end, array)
        for end in (one.removeprefix(module) for one in whole if one.startswith(f"{module}."))
        for way, array in broken(module + end, whole[module + end]).items()
    }
    cases |= {end: (module + end, np.ones(96, np.float32)) for end in OTHERS if module + end not in whole}
    for case, (tensor, array) in cases.items():
        write_weights(src, {one: found for one, found in (whole | {tensor: array}).items() if found is not None})
        with pytest.raises(Refusal, match=tensor) as refusal:
            load_folder(src)
        said = str(refusal.value)  # and what would be right
        assert re.search(r"expected | asks for | needs \w+\d|; \w+", said.partition(tensor)[2]), (case, said)


@pytest.mark.parametrize("dtype", ["F8_E4M3FNUZ", "F8_E5M2", "F8_E8M0"])
def test_other_numbers_of_eight_bits_are_refused(tmp_path, dtype):
    """Those of AMD's cards have other exponents, and would be read as twice the number."""
    src = fp8_checkpoint(tmp_path / "src")
    path = src / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].replace(b'"F8_E4M3"', f'"{dtype}"'.encode()).rstrip()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    with pytest.raises(Refusal, match=r"tensor 'model\.layers\.\S+proj\.weight' ") as refusal:
        load_folder(src)
    assert dtype.lower().removeprefix("f8_") in str(refusal.value).lower()


OLDER = {
    "gptq": (
        "quantize_config.json",
        {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "sym": False, "true_sequential": True},
    ),
    "awq": ("quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}),
}


@pytest.mark.parametrize("method", OLDER)
def test_files_of_2023_say_how_weights_are_quantised(tmp_path, method):
    """Where config.json does not; a file that stands beside a config.json that does has no effect."""
    name, described = OLDER[method]
    config = {"gptq": gptq_config, "awq": awq_config}[method](group_size=32)
    src = block_checkpoint(tmp_path / "src", KEPT_CODES[method]._replace(config=config))
    wanted = load_folder(src)
    (src / name).write_text(json.dumps({**described, "w_bit": 3, "bits": 3}))
    assert_same(load_folder(src), wanted)
    whole = json.loads((src / "config.json").read_text())
    del whole["quantization_config"]
    (src / "config.json").write_text(json.dumps(whole))
    with pytest.raises(Refusal, match=rf"src/{name}: bits=3: expected 4"):
        load_folder(src)
    (src / name).write_text(json.dumps(described))
    assert_same(load_folder(src), wanted)
    convert(src, tmp_path / "out", verify="shapes")
    assert_same(load_folder(tmp_path / "out"), wanted)
