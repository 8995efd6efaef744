"""Damaged tensors of quantised checkpoints: refused by file, name, value and remedy, before anything is loaded.

``test_malformed_maps`` breaks every tensor of every format; here stand the sentences."""

import ml_dtypes
import numpy as np
import pytest
from block_checkpoints import KINDS, block_checkpoint
from fp8_checkpoints import DOWN, FP8, changed, fp8_checkpoint, raw_tensor
from packed_weights import awq_config, fp8_config, gptq_config
from stored_params import rewrite, stored_checkpoint
from tiny import tiny_checkpoint

from convert import Refusal, load_folder
from convert.cli import main
from jspec.checkpoints.checkpoint import Checkpoint

# The warning comes before the values are read.
pytestmark = pytest.mark.filterwarnings("ignore:.*are dequantised as they are read:UserWarning")


def refuses(src, words, when_read=False):
    """That a checkpoint is refused with ``words``: before any weight is read, or while it is."""
    with pytest.raises(Refusal) as refusal:
        _ = load_folder(src) if when_read else Checkpoint.open(src).params()
    assert words in str(refusal.value)


def entry(number, place=(-1, -1)):
    """A change of one number of a tensor."""

    def change(array):
        array[place] = number
        return array

    return change


def bits(number: int):
    """A change of the last number of a tensor of bytes, by its bits."""

    def change(array):
        array.view(np.uint8)[-1, -1] = number
        return array

    return change


def as_dtype(dtype):
    return lambda array: array.astype(dtype)


BAD = ((np.nan, "nan"), (np.inf, "inf"), (0, "0.0"), (-1, "-1.0"))
NEEDS_FP8 = "is stored as {}, but LlamaForCausalLM, quantised as quantization_config says, needs "
# Format, changes of tensors (those of DOWN by what their names end with; None is none at all), and words, where {} is DOWN.
IN_CODES = [
    ("gptq", {".qzeros": None}, "src: tensor '{}.qzeros' is missing, and '{}.qweight', '{}.scales', "),
    ("gptq", {".qweight": None}, "tensor '{}.qweight' is missing, and '{}.qzeros', '{}.scales', "),
    ("gptq", {".scales": None}, "tensor '{}.scales' is missing, and "),
    ("gptq order", {".g_idx": None}, "tensor '{}.g_idx' is missing, and "),
    ("awq", {".qzeros": None}, "tensor '{}.qzeros' is missing, and "),
    ("packed", {".weight_shape": None}, "tensor '{}.weight_shape' is missing, and "),
    ("packed zeros", {".weight_zero_point": None}, "tensor '{}.weight_zero_point' is missing, and "),
    (
        *("gptq", {".qweight": lambda array: array[1:]}),
        "model.safetensors: tensor '{}.qweight' is int32 [11, 64], but config.json asks for int32 [12, 64]; fetch",
    ),
    ("gptq", {".qweight": as_dtype(np.int64)}, "is int64 [12, 64], but config.json asks for"),
    ("gptq", {".scales": lambda array: array[:6]}, "is float16 [6, 64], but config.json asks for float32 or bf"),
    ("gptq", {".qzeros": np.transpose}, "is int32 [8, 12], but config.json asks for int32 [12, 8]"),
    ("gptq", {".g_idx": lambda array: array[:8]}, "is int32 [8], but config.json asks for int32 [96]"),
    ("awq", {".qweight": np.transpose}, "is int32 [8, 96], but config.json asks for int32 [96, 8]"),
    ("packed", {".weight_scale": lambda array: array[:, :1]}, "is float16 [64, 1], but config.json asks for"),
    ("packed", {".weight_shape": entry(65, 0)}, "'{}.weight_shape' holds [65, 96], but config.json asks for a weight"),
    *(
        (name, {end: entry(number)}, f"tensor '{{}}{end}' holds {shown}: expected numbers other than 0; fetch it again")
        for name, end in (("gptq", ".scales"), ("awq", ".scales"), ("packed", ".weight_scale"))
        for number, shown in BAD[:3]
    ),
    ("gptq order", {".g_idx": entry(12, 3)}, "'{}.g_idx' holds 12: expected groups in 0..11; fetch it again"),
    ("gptq order", {".g_idx": entry(-1, 3)}, "'{}.g_idx' holds -1: expected groups in 0..11; fetch it again"),
    ("gptq", {".g_idx": entry(1, 3)}, "'{}.g_idx' has groups that do not follow each other, but desc_act is false;"),
    (
        *("gptq", {".weight": np.ones((64, 96), np.float16)}),
        "src/model.safetensors: holds '{}.qweight' besides '{}.weight', which is the same weight; delete one",
    ),
    (
        *("packed", {"lm_head.weight_packed": np.ones((1, 1), np.int32)}),
        "ignore says that 'lm_head' is not quantised, but model.safetensors holds 'lm_head.weight_p",
    ),
    (
        *("gptq", {"model.norm.qweight": np.ones((8, 1), np.int32)}),
        "tensor 'model.norm.qweight' has no place in LlamaForCausalLM as config.json describes it",
    ),
    ("awq", {".g_idx": np.zeros(96, np.int32)}, "tensor '{}.g_idx' has no place in LlamaForCausalLM"),
]
STORED_CODES = [
    *(
        (name, {end: entry(number)}, f"tensor '{{}}{end}' holds {shown}: expected numbers other than 0")
        for name, end in (("packed channel", ".weight_scale"), ("packed 8 bits, groups", ".weight_scale"))
        for number, shown in ((np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf"), (0, "0.0"))
    ),
    ("packed channel", {".weight_scale": lambda array: array[:-1]}, "tensor '{}.weight_scale' is "),
    ("packed channel", {".weight_scale": None}, "tensor '{}.weight_scale' is missing, and "),
    ("gptq symmetric", {".qzeros": lambda array: entry(array[0, 0] + 1)(array)}, "'{}.qzeros' holds both 7 and 8"),
    ("packed zeros", {".weight_shape": lambda _: np.array([64, 64])}, "'{}.weight_shape' holds [64, 64], but"),
    *(
        ("nvfp4", {".weight_scale": bits(code)}, "'{}.weight_scale' holds numbers that are negative")
        for code in (0x7F, 0xFF, 0x81)
    ),
    *(
        ("nvfp4", {".weight_global_scale": lambda array, n=number: np.full_like(array, n)}, "_global_scale' holds ")
        for number in (0, np.nan, np.inf, -1)
    ),
    *(
        (
            *("mxfp4", {".weight_scale": entry(number)}),
            f"'{{}}.weight_scale' holds the scale {number}: expected at most 133, for weights up to 384; 255 is no number",
        )
        for number in (134, 255)
    ),
    ("mxfp4", {".weight_scale": lambda array: array[:, :-1]}, "'{}.weight_scale' is uint8 [64, 2], but"),
    ("mxfp4", {".weight_scale": lambda array: array.repeat(2, axis=1)}, "'{}.weight_scale' is uint8 [64, 6], but"),
    ("mxfp4", {".weight_scale": as_dtype(np.float32)}, "'{}.weight_scale' is float32 [64, 3], but"),
    ("mxfp4", {".weight_scale": as_dtype(np.int8)}, "'{}.weight_scale' is int8 [64, 3], but"),
    ("mxfp4", {".weight_scale": None}, "tensor '{}.weight_scale' is missing, and '{}.weight_packed' needs it"),
    ("mxfp4", {".weight_packed": lambda array: array[:-1]}, "'{}.weight_packed' is uint8 [63, 48], but"),
    ("mxfp4", {".weight_packed": as_dtype(np.int32)}, "'{}.weight_packed' is int32 [64, 48], but"),
    ("mxfp4", {".weight_packed": None}, "tensor '{}.weight_packed' is missing, and '{}.weight_scale' needs it"),
    ("mxfp4", {".weight_zero_point": np.ones((64, 3), np.uint8)}, "'{}.weight_zero_point' has no place in"),
    ("packed in another order", {".weight_g_idx": entry(-1, 3)}, "'{}.weight_g_idx' holds -1: expected groups in 0..2"),
    ("packed in another order", {".weight_g_idx": None}, "tensor '{}.weight_g_idx' is missing, and "),
    ("packed in no other order", {".weight_g_idx": entry(0, 3)}, "'{}.weight_g_idx' holds -1: expected groups in 0..2"),
    ("codes in bytes", {".weight": entry(8)}, "'{}.weight' holds 8: expected codes in -8..7, of four bits"),
    ("codes in bytes", {".weight_scale": None}, "tensor '{}.weight_scale' is missing, and '{}.weight' needs it"),
    *(
        ("awq modelopt", {end: entry(number, -1)}, f"tensor '{{}}{end}' holds {shown}: expected ")
        for end in (".weight_scale", ".pre_quant_scale")
        for number, shown in BAD[:3]
    ),
    ("awq modelopt", {".pre_quant_scale": lambda array: -array}, "expected positive numbers"),
    ("awq modelopt", {".pre_quant_scale": lambda array: array[1:]}, "'{}.pre_quant_scale' is float32 [255], but"),
    ("awq modelopt", {".weight_scale_2": np.ones(2, np.float32)}, "'{}.weight_scale_2' is float32 [2], but"),
    ("awq modelopt", {".weight": lambda array: array[1:]}, "'{}.weight' is uint8 [63, 256], but config.json asks for"),
    *(
        (
            *("mxfp8", {".weight_scale": entry(number)}),
            f"'{{}}.weight_scale' holds the scale {number}: expected at most 134, for weights up to 57344; 255 is no number",
        )
        for number in (135, 255)
    ),
    ("mxfp8", {".weight_scale": lambda array: array[:, :-1]}, "'{}.weight_scale' is uint8 [64, 2], but"),
    ("mxfp8 modelopt", {".weight_scale": as_dtype(np.float32)}, "'{}.weight_scale' is float32 [64, 3], but"),
    ("mxfp8", {".weight_scale": None}, "tensor '{}.weight_scale' is missing, and '{}.weight' needs it"),
    ("mxfp8", {".weight": as_dtype(np.int8)}, "'{}.weight' is int8 [64, 96], but config.json asks for float8_e4m3fn"),
    ("mxfp8", {".weight": bits(0x7F)}, "tensor '{}.weight' holds NaN (0x7f or 0xff)"),
]
INVERSE = ".weight_scale_inv"
IN_BLOCKS = [
    ("fp8", {INVERSE: None}, "src: tensor '{}.weight_scale_inv' is missing, and '{}.weight' needs it; fetch it again"),
    ("fp8", {".weight": None}, "tensor '{}.weight' is missing, and '{}.weight_scale_inv' needs it"),
    ("fp8", {INVERSE: np.ones((2, 3), np.float32)}, "_inv' is float32 [2, 3], but config.json asks for float32 or bf"),
    (
        "fp8",
        {INVERSE: as_dtype(np.int32)},
        "_inv' is int32 [2, 4], but config.json asks for float32 or bfloat16 or flo",
    ),
    (
        "fp8",
        {".weight": as_dtype(ml_dtypes.bfloat16)},
        "is bfloat16 [64, 96], but config.json asks for float8_e4m3fn [64",
    ),
    ("deepseek", {INVERSE: None}, "src: tensor '{}.weight_scale_inv' is missing, and '{}.weight' needs it"),
    ("deepseek", {INVERSE: np.ones((3, 2), np.float32)}, "is float32 [3, 2], but config.json asks for float32 or bf"),
    ("deepseek", {INVERSE: np.ones((2, 3), np.uint8)}, "is uint8 [2, 3], but config.json asks for float32 or bfloat16"),
    ("deepseek", {".weight_scale": np.ones((2, 3), np.float32)}, "'{}.weight_scale' has no place in LlamaForCausalLM"),
    *(
        (name, {INVERSE: entry(number)}, f"{{}}.weight_scale_inv' holds {shown}: expected positive numbers; fetch")
        for name in ("fp8", "deepseek")
        for number, shown in BAD
    ),
    *(
        (name, {".weight": bits(code)}, "tensor '{}.weight' holds NaN (0x7f or 0xff)")
        for name in ("deepseek", "channel")
        for code in (0x7F, 0xFF)
    ),
]
SCALE, COLUMN = ".weight_scale", np.ones((64, 1), np.float32)
BY_CHANNEL = [
    ("channel", {SCALE: None}, "tensor '{}.weight_scale' is missing, and LlamaForCausalLM needs it"),
    ("channel", {SCALE: COLUMN[:63]}, "'{}.weight_scale' has shape [63, 1]: expected [64, 1], a scale for each"),
    ("channel", {SCALE: COLUMN.T}, "has shape [1, 64]: expected [64, 1], a scale for each output channel"),
    ("channel", {SCALE: COLUMN[:1]}, "has shape [1, 1]: expected [64, 1], a scale for each output channel"),
    ("tensor", {SCALE: COLUMN}, "has shape [64, 1]: expected [1], a scale for each weight"),
    ("fp8 tensor", {SCALE: COLUMN[:2, 0]}, "has shape [2]: expected [1], a scale for each weight"),
    *(
        ("channel", {SCALE: entry(number)}, f"'{{}}.weight_scale' holds {shown}: expected positive numbers")
        for number, shown in BAD
    ),
    ("tensor", {SCALE: np.zeros(1, np.float32)}, "holds 0.0: expected positive numbers"),
    (
        *("channel", {SCALE: as_dtype(np.int32)}),
        f"'{{}}.weight_scale' {NEEDS_FP8.format('int32')}one of float32, bfloat16, float16",
    ),
    (
        "channel",
        {".weight": as_dtype(ml_dtypes.bfloat16)},
        f"'{{}}.weight' {NEEDS_FP8.format('bfloat16')}float8_e4m3fn",
    ),
    ("channel", {".weight": as_dtype(ml_dtypes.float8_e5m2)}, "'{}.weight' is stored as F8_E5M2; only"),
    ("channel", {".weight": np.ones((64, 95), FP8)}, "'{}.weight' has shape [64, 95], but config.json asks for"),
    (
        *("channel", {"lm_head.weight": as_dtype(FP8), "lm_head.weight_scale": np.ones((97, 1), np.float32)}),
        f"'lm_head.weight' {NEEDS_FP8.format('float8_e4m3fn')}one of float32, bfloat16, float16",
    ),
    ("channel", {"lm_head.weight_scale": np.ones((97, 1), np.float32)}, "'lm_head.weight_scale' has no place in"),
    ("fp8 tensor", {INVERSE: np.ones(1, np.float32)}, "'{}.weight_scale_inv' holds scales of blocks"),
]


def checkpoint(path, name: str):
    if name == "fp8 tensor":  # not the blocks that are dequantised
        return stored_checkpoint(path, "fp8")
    return block_checkpoint(path, KINDS[name]) if name in KINDS else stored_checkpoint(path, name)


@pytest.mark.parametrize(("name", "changes", "words"), [*IN_CODES, *STORED_CODES, *IN_BLOCKS, *BY_CHANNEL])
def test_damaged_tensors_are_refused(tmp_path, name, changes, words):
    src = checkpoint(tmp_path / "src", name)
    for end, change in changes.items():
        tensor = DOWN + end if end.startswith(".") else end
        array = change(raw_tensor(src, tensor).copy()) if callable(change) else change
        changed(src, **{tensor: None if array is None else np.ascontiguousarray(array)})
    refuses(src, words.replace("{}", DOWN), when_read=name in KINDS or ".weight" in changes)


def test_a_damaged_checkpoint_is_not_converted(tmp_path, capsys):
    src = changed(fp8_checkpoint(tmp_path / "src"), **{f"{DOWN}.weight_scale": None})
    assert main([str(src), str(tmp_path / "out")]) == 2
    assert f"tensor '{DOWN}.weight_scale' is missing, and LlamaForCausalLM needs it" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "words"), [(fp8_config(), "FP8 with a scale for each block of 40 x 24"), (awq_config(), "AWQ")]
)
def test_a_checkpoint_in_which_nothing_is_quantised(tmp_path, config, words):
    src = tiny_checkpoint(tmp_path / "src", quantization_config=config)
    refuses(src, f"{src}/config.json: quantization_config says that the weights are {words}")
    refuses(src, "but none of the files is; remove it if they are not quantised")


def gptq_keys(**changes):
    return {"quantization_config": gptq_config(**changes)}


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        (
            *("gptq", {"intermediate_size": 100}),
            "src/config.json: 'model.layers.0.mlp.gate_proj' has 100 output features: expected a multiple of 8, because ei",
        ),
        ("gptq", {"hidden_size": 60}, "has 60 input features: expected a multiple of 8"),
        ("awq", {"intermediate_size": 100}, "has 100 output features: expected a multiple of 8"),
        (
            "packed",
            {"hidden_size": 60},
            "group_size=8: expected -1 or a divisor of 60, the number of input features of",
        ),
        ("gptq", gptq_keys(group_size=40), "group_size=40: expected -1 or a divisor of 64, the nu"),
        (
            *("awq", {"quantization_config": awq_config(group_size=10**9)}),
            "=1000000000: expected -1 or a divisor of 64, the nu",
        ),
        (
            *("gptq", gptq_keys(modules_to_not_convert=[DOWN])),
            f"modules_to_not_convert says that '{DOWN}' is not quantised, but model.safetensors holds '{DOWN}.qweight'; rem",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(tmp_path, name, keys, words):
    src = block_checkpoint(tmp_path / "src", KINDS[name])
    rewrite(src, **keys)
    refuses(src, words)


def test_a_tied_head_that_is_quantised_is_another_matrix(tmp_path):
    src = block_checkpoint(tmp_path / "src", KINDS["gptq"], head=True, vocab_size=96)
    rewrite(src, tie_word_embeddings=True)
    refuses(src, "tensor 'lm_head.g_idx' has no place in LlamaForCausalLM as config.json describes it")
