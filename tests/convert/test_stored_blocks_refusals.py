"""Configs and tensors of checkpoints with a scale for each block that are refused, by file, name, value and remedy."""

import json

import ml_dtypes
import numpy as np
import pytest
from block_checkpoints import KINDS, block_checkpoint
from fp8_checkpoints import FP8
from packed_weights import auto_round_config, awq_config, compressed_config, fp8_config, gptq_config, pack_config
from safetensors.numpy import load_file
from tiny import tiny_checkpoint, tiny_config, write_weights

from convert import Refusal, load_folder
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.huggingface.config import read_config

DOWN = "model.layers.1.mlp.down_proj"  # [64, 96]
# The warning comes before the values are read.
pytestmark = pytest.mark.filterwarnings("ignore:.*are dequantised as they are read:UserWarning")


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        *(
            (
                fp8_config(weight_block_size=block),
                f"weight_block_size={block}: expected two integers in 1..1048576, the h",
            )
            for block in ([0, 128], [128], [128, 128, 128], [128, 1.5], [True, 1], 128, [2**21, 1])
        ),
        (fp8_config(fmt="e5m2"), "quantization_config.fmt='e5m2': expected 'e4m3' or 'float8_e4m3fn'; of quantised"),
        (
            fp8_config(modules_to_not_convert="lm_head"),
            "modules_to_not_convert='lm_head': expected a list of module names",
        ),
        *((gptq_config(bits=bits), f"bits={bits}: expected 4 or 8; of quantised") for bits in (2, 3, None)),
        (
            gptq_config(checkpoint_format="marlin"),
            "checkpoint_format='marlin': expected 'gptq' or 'gptq_v2'; of quantised",
        ),
        (gptq_config(checkpoint_format=None, format="gptq_p"), "config.format='gptq_p': expected 'gptq' or 'gptq_v2'"),
        (gptq_config(pack_dtype="int16"), "quantization_config.pack_dtype='int16': expected 'int32'; of quantised"),
        (gptq_config(is_marlin_format=True), "quantization_config.is_marlin_format=True: expected False"),
        (gptq_config(rotation="hadamard"), "rotation='hadamard': expected none, because rotated weights are not read"),
        (
            gptq_config(dynamic={"-:.*gate": {}, "+:.*down.*": {"bits": 8}}),
            "dynamic.+:.*down.*={'bits': 8}: expected none,",
        ),
        (
            gptq_config(dynamic={".*up.*": {"group_size": 8}}),
            "dynamic..*up.*={'group_size': 8}: expected none, because al",
        ),
        (gptq_config(dynamic=["a"]), "quantization_config.dynamic=['a']: expected an object or null"),
        (
            gptq_config(group_size=0),
            "group_size=0: expected a positive integer, or -1 for one group of all input features",
        ),
        (gptq_config(group_size=-2), "quantization_config.group_size=-2: expected an integer in -1.."),
        (gptq_config(group_size=None), "quantization_config.group_size is missing: expected an integer in -1.."),
        (gptq_config(desc_act=1), "quantization_config.desc_act=1: expected true or false"),
        (awq_config(bits=8), "quantization_config.bits=8: expected 4; of quantised"),
        (awq_config(zero_point=False), "quantization_config.zero_point=False: expected True; of quantised"),
        *(
            (
                awq_config(version=name),
                f"version='{name}': expected 'gemm', because weights lie in other orders elsewhere",
            )
            for name in ("gemv", "GEMV_FAST", "exllama", "marlin", "llm-awq")
        ),
        (awq_config(version=None, format="gemv"), "quantization_config.format='gemv': expected 'gemm'"),
        (awq_config(version=3), "quantization_config.version=3: expected a string"),
        (
            auto_round_config("auto_round:fp8"),
            "packing_format='auto_round:fp8': expected 'auto_round:auto_gptq' or 'auto_round:gptq' or",
        ),
        (auto_round_config("auto_round:auto_awq", bits=8), "quantization_config.bits=8: expected 4; of quantised"),
        (auto_round_config(None, bits=3), "quantization_config.bits=3: expected 4 or 8; of quantised"),
        (auto_round_config(None, data_type="mx_fp"), "quantization_config.data_type='mx_fp': expected 'int'"),
        (auto_round_config(None, act_bits=8), "quantization_config.act_bits=8: expected 16"),
        (
            auto_round_config(None, extra_config={"model.layers.0.mlp.up_proj": {"bits": 8}}),
            "extra_config.model.layers.0.mlp.up_proj.bits=8: expected 4, because all modules are quantised alike",
        ),
        (pack_config(num_bits=2), "group_0.weights.num_bits=2: expected 4 or 8; of quantised"),
        (pack_config(type="float"), "group_0.weights.type='float': expected 'int'"),
        (pack_config(actorder="group"), "group_0.weights.actorder='group': expected False or 'weight' or 'static'"),
        (pack_config(strategy="tensor"), "group_0.weights.strategy='tensor': expected 'group' or 'channel'"),
        (pack_config(dynamic=True), "group_0.weights.dynamic=True: expected False"),
        (pack_config(symmetric="yes"), "group_0.weights.symmetric='yes': expected true or false"),
        (pack_config(group_size=0), "group_0.weights.group_size=0: expected a positive integer"),
        ({**pack_config(), "ignore": [4]}, "quantization_config.ignore=[4]: expected a list of module names"),
        (
            compressed_config("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128]),
            "group_0.weights.block_structure=[128]: expected two integers in 1..1048576",
        ),
    ],
)
def test_unsupported_configs_are_refused(tmp_path, quantization, words):
    (tmp_path / "config.json").write_text(json.dumps({**tiny_config(), "quantization_config": quantization}))
    with pytest.raises(Refusal) as refusal:
        read_config(Folder(tmp_path))
    assert words in str(refusal.value)
    assert str(refusal.value).startswith(f"{tmp_path}/config.json: quantization_config")


def refuses(src, words):
    """That a checkpoint is refused with ``words``."""
    with pytest.raises(Refusal) as refusal:
        load_folder(src)
    assert words in str(refusal.value)


def changed(folder, change):
    """A checkpoint without FP8 tensors, after ``change`` of the dictionary of its tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    write_weights(folder, {name: np.ascontiguousarray(array) for name, array in tensors.items()})
    return folder


def entry(end, value, at=(0, 0)):
    """A change of one number of a tensor of ``DOWN``."""

    def change(tensors):
        tensors[DOWN + end][at] = value

    return change


def dropped(end):
    return lambda tensors: tensors.pop(DOWN + end)


def replaced(end, function):
    """A change of a tensor of ``DOWN``."""
    return lambda tensors: tensors.update({DOWN + end: function(tensors[DOWN + end])})


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        (
            "gptq",
            dropped(".qzeros"),
            f"src: tensor '{DOWN}.qzeros' is missing, and '{DOWN}.qweight', '{DOWN}.scales', ",
        ),
        ("gptq", dropped(".qweight"), f"tensor '{DOWN}.qweight' is missing, and '{DOWN}.qzeros', '{DOWN}.scales', "),
        ("gptq", dropped(".scales"), f"tensor '{DOWN}.scales' is missing, and "),
        ("gptq order", dropped(".g_idx"), f"tensor '{DOWN}.g_idx' is missing, and "),
        ("awq", dropped(".qzeros"), f"tensor '{DOWN}.qzeros' is missing, and "),
        ("packed", dropped(".weight_shape"), f"tensor '{DOWN}.weight_shape' is missing, and "),
        ("packed zeros", dropped(".weight_zero_point"), f"tensor '{DOWN}.weight_zero_point' is missing, and "),
        (
            "gptq",
            replaced(".qweight", lambda array: array[1:]),
            f"model.safetensors: tensor '{DOWN}.qweight' is int32 [11, 64], but config.json asks for int32 [12, 64]; fetch",
        ),
        (
            "gptq",
            replaced(".qweight", lambda array: array.astype(np.int64)),
            "is int64 [12, 64], but config.json asks for",
        ),
        (
            "gptq",
            replaced(".scales", lambda array: array[:6]),
            "is float16 [6, 64], but config.json asks for float32 or bf",
        ),
        (
            "gptq",
            replaced(".qzeros", lambda array: array.T),
            "is int32 [8, 12], but config.json asks for int32 [12, 8]",
        ),
        ("gptq", replaced(".g_idx", lambda array: array[:8]), "is int32 [8], but config.json asks for int32 [96]"),
        (
            "awq",
            replaced(".qweight", lambda array: array.T),
            "is int32 [8, 96], but config.json asks for int32 [96, 8]",
        ),
        (
            "packed",
            replaced(".weight_scale", lambda array: array[:, :1]),
            "is float16 [64, 1], but config.json asks for",
        ),
        (
            "packed",
            entry(".weight_shape", 65, 0),
            f"'{DOWN}.weight_shape' holds [65, 96], but config.json asks for a weight",
        ),
        *(
            (
                kind,
                entry(end, number),
                f"tensor '{DOWN}{end}' holds {shown}: expected numbers other than 0; fetch it again",
            )
            for kind, end in (("gptq", ".scales"), ("awq", ".scales"), ("packed", ".weight_scale"))
            for number, shown in ((np.nan, "nan"), (np.inf, "inf"), (0, "0.0"))
        ),
        ("gptq order", entry(".g_idx", 12, 3), f"'{DOWN}.g_idx' holds 12: expected groups in 0..11; fetch it again"),
        ("gptq order", entry(".g_idx", -1, 3), f"'{DOWN}.g_idx' holds -1: expected groups in 0..11; fetch it again"),
        (
            "gptq",
            entry(".g_idx", 1, 3),
            f"'{DOWN}.g_idx' has groups that do not follow each other, but desc_act is false;",
        ),
        (
            "gptq",
            lambda tensors: tensors.update({f"{DOWN}.weight": np.ones((64, 96), np.float16)}),
            f"src/model.safetensors: holds '{DOWN}.qweight' besides '{DOWN}.weight', which is the same weight; delete one",
        ),
        (
            "packed",
            lambda tensors: tensors.update({"lm_head.weight_packed": np.ones((1, 1), np.int32)}),
            "quantization_config.ignore says that 'lm_head' is not quantised, but model.safetensors holds 'lm_head.weight_p",
        ),
        (
            "gptq",
            lambda tensors: tensors.update({"model.norm.qweight": np.ones((8, 1), np.int32)}),
            "tensor 'model.norm.qweight' has no place in LlamaForCausalLM as config.json describes it",
        ),
        (
            "awq",
            lambda tensors: tensors.update({f"{DOWN}.g_idx": np.zeros(96, np.int32)}),
            f"tensor '{DOWN}.g_idx' has no place in LlamaForCausalLM",
        ),
    ],
)
def test_damaged_tensors_are_refused(tmp_path, kind, change, words):
    src = changed(block_checkpoint(tmp_path / "src", KINDS[kind]), change)
    refuses(src, words)


@pytest.mark.parametrize(
    ("weight", "scales", "words"),
    [
        (FP8, None, f"src: tensor '{DOWN}.weight_scale_inv' is missing, and '{DOWN}.weight' needs it; fetch it again"),
        (
            None,
            np.ones((2, 4), np.float32),
            f"tensor '{DOWN}.weight' is missing, and '{DOWN}.weight_scale_inv' needs it",
        ),
        (
            FP8,
            np.ones((2, 3), np.float32),
            "_inv' is float32 [2, 3], but config.json asks for float32 or bfloat16 or float16",
        ),
        (
            FP8,
            np.ones((2, 4), np.int32),
            "_inv' is int32 [2, 4], but config.json asks for float32 or bfloat16 or float16 [2",
        ),
        (
            ml_dtypes.bfloat16,
            np.ones((2, 4), np.float32),
            "is bfloat16 [64, 96], but config.json asks for float8_e4m3fn [64",
        ),
        *(
            (
                FP8,
                np.full((2, 4), number, np.float32),
                f"weight_scale_inv' holds {shown}: expected positive numbers; fetch",
            )
            for number, shown in ((np.nan, "nan"), (np.inf, "inf"), (0, "0.0"), (-1, "-1.0"))
        ),
    ],
)
def test_damaged_blocks_of_fp8(tmp_path, weight, scales, words):
    """One linear map is FP8 in blocks of 40 x 24, and the others are not quantised."""
    src = tiny_checkpoint(tmp_path / "src", dtype="bfloat16", quantization_config=fp8_config())
    tensors = load_file(src / "model.safetensors")
    wide = tensors.pop(f"{DOWN}.weight")
    if weight is not None:
        tensors[f"{DOWN}.weight"] = wide.astype(weight)
    if scales is not None:
        tensors[f"{DOWN}.weight_scale_inv"] = scales
    write_weights(src, tensors)
    refuses(src, words)


def test_a_checkpoint_in_which_nothing_is_quantised(tmp_path):
    for i, (config, words) in enumerate(
        ((fp8_config(), "FP8 with a scale for each block of 40 x 24"), (awq_config(), "AWQ"))
    ):
        src = tiny_checkpoint(tmp_path / str(i), quantization_config=config)
        refuses(src, f"{src}/config.json: quantization_config says that the weights are {words}")
        refuses(src, "but none of the files is; remove it if they are not quantised")


@pytest.mark.parametrize(
    ("kind", "keys", "words"),
    [
        (
            "gptq",
            {"intermediate_size": 100},
            "src/config.json: 'model.layers.0.mlp.gate_proj' has 100 output features: expected a multiple of 8, because ei",
        ),
        ("gptq", {"hidden_size": 60}, "has 60 input features: expected a multiple of 8"),
        ("awq", {"intermediate_size": 100}, "has 100 output features: expected a multiple of 8"),
        (
            "packed",
            {"hidden_size": 60},
            "group_size=8: expected -1 or a divisor of 60, the number of input features of",
        ),
        (
            "gptq",
            {"quantization_config": gptq_config(group_size=40)},
            "group_size=40: expected -1 or a divisor of 64, the nu",
        ),
        (
            "awq",
            {"quantization_config": awq_config(group_size=10**9)},
            "=1000000000: expected -1 or a divisor of 64, the nu",
        ),
        (
            "gptq",
            {"quantization_config": gptq_config(modules_to_not_convert=[DOWN])},
            f"modules_to_not_convert says that '{DOWN}' is not quantised, but model.safetensors holds '{DOWN}.qweight'; rem",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(tmp_path, edit, kind, keys, words):
    src = block_checkpoint(tmp_path / "src", KINDS[kind])
    edit(src / "config.json", **keys)
    refuses(src, words)


def test_a_tied_head_that_is_quantised_is_another_matrix(tmp_path, edit):
    src = block_checkpoint(tmp_path / "src", KINDS["gptq"], head=True, vocab_size=96)
    edit(src / "config.json", tie_word_embeddings=True)
    refuses(src, "tensor 'lm_head.g_idx' has no place in LlamaForCausalLM as config.json describes it")
