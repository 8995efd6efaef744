"""Checkpoints that torchao quantises: written by its own functions from a model of transformers, and what it computes.

``accelerate``, without which transformers quantises nothing, is no part of the extra ``parity``. So the model is quantised
and saved here by what transformers calls; its folders were found to have the same tensors and the same
``quantization_config``."""

import copy

import numpy as np
import pytest
from block_checkpoints import KEPT_CODES, block_checkpoint
from children import run_library
from fp8_checkpoints import DOWN, changed, raw_tensor
from packed_weights import torchao_config
from stored_params import logits, refuses, rewrite

from convert import load_folder
from jspec.config.model_fields import PLAIN_HEAD

WRITE = """
import json, os, sys
import numpy as np, torch, transformers
from safetensors.torch import save_file
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import granularity, quant_api, quantize_
root = os.getcwd()
for number, (name, arguments, head, _) in enumerate(json.loads(sys.argv[1])):
    os.makedirs(f"{root}/{number}")
    os.chdir(f"{root}/{number}")
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2, vocab_size=97)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2, **sizes)).eval()
    made = {"granularity": granularity, "weight_granularity": granularity, "mapping_type": quant_api.MappingType}
    each = {}
    for key, value in arguments.items():
        name_of, *given = value
        each[key] = getattr(made.get(key, torch), name_of)
        if "granularity" in key:
            each[key] = each[key](*given)
    config = getattr(quant_api, name)(**each)
    # A CPU cannot round activations to FP8, but the weights are those of the class for weights alone.
    alone = quant_api.Float8WeightOnlyConfig(**each) if name.startswith("Float8") else config
    if name == "Int8DynamicActivationIntxWeightConfig":  # which a CPU has no kernel for
        alone = quant_api.IntxWeightOnlyConfig(each["weight_dtype"], each["weight_granularity"])
    quantize_(model, alone, lambda module, name: isinstance(module, torch.nn.Linear) and (head or name != "lm_head"))
    model.config.quantization_config = transformers.TorchAoConfig(config)
    model.config.save_pretrained("folder")
    tensors, metadata = flatten_tensor_state_dict(model.state_dict())
    save_file(tensors, "folder/model.safetensors", metadata | {"format": "pt"})
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            wide = module.weight.dequantize() if hasattr(module.weight, "qdata") else module.weight
            module.weight = torch.nn.Parameter(wide.detach().float(), requires_grad=False)
    rng, found = np.random.default_rng(0), []
    with torch.no_grad():
        for length in (5, 33):
            found.append(model(torch.tensor(rng.integers(97, size=(1, length)))).logits[0].numpy())
    np.savez("logits.npz", *found)
"""
INT4, INT3, GROUPS = ("weight_dtype", ["int4"]), ("weight_dtype", ["int3"]), ["PerGroup", 32]
CLASSES = [  # class, its arguments with how their values are made, whether the head is quantised, and as what it is kept
    ("Int8WeightOnlyConfig", {}, True, "int8"),
    ("Int8WeightOnlyConfig", {"granularity": ["PerTensor"]}, False, "int8"),
    ("Int8WeightOnlyConfig", {"granularity": GROUPS}, True, "int8_32_float32"),
    ("Int8DynamicActivationInt8WeightConfig", {}, False, "int8"),
    ("IntxWeightOnlyConfig", dict([INT4, ("granularity", GROUPS)]), False, "int4_32_float32"),
    ("IntxWeightOnlyConfig", {"granularity": ["PerAxis", 0]}, False, "int8"),
    (
        *("IntxWeightOnlyConfig", dict([INT3, ("granularity", GROUPS), ("mapping_type", ["ASYMMETRIC"])])),
        *(False, "int4_32_float32_zeros"),
    ),
    (
        *("Int8DynamicActivationIntxWeightConfig", dict([INT4, ("weight_granularity", GROUPS)])),
        *(False, "int4_32_float32"),
    ),
    ("Float8WeightOnlyConfig", {}, False, "fp8"),
    ("Float8DynamicActivationFloat8WeightConfig", {"granularity": ["PerTensor"]}, True, "fp8"),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Where the tool has written a ``folder`` and ``logits.npz`` for each of ``CLASSES``, by its number."""
    folder = tmp_path_factory.mktemp("written")
    run_library(WRITE, folder, CLASSES)
    return folder


@pytest.mark.parametrize("number", range(len(CLASSES)), ids=lambda number: "-".join(map(str, CLASSES[number])))
def test_a_folder_of_the_tool_computes_what_the_tool_reads(written, number):
    _, _, head, form = CLASSES[number]
    folder, wanted = written / f"{number}/folder", np.load(written / f"{number}/logits.npz")
    config, _ = load_folder(folder)
    assert (config.quantization, config.other_formats) == (form, () if head else PLAIN_HEAD)
    for found, logit in zip(logits(folder), wanted.values(), strict=True):
        np.testing.assert_allclose(found, logit, rtol=0, atol=1e-5 * np.abs(logit).max())


def test_zero_points_are_refused(tmp_path):
    src, name = block_checkpoint(tmp_path / "src", KEPT_CODES["torchao int8"]), f"{DOWN}._weight_zero_point"
    zeros = raw_tensor(src, name).copy()
    zeros[3] = -1
    refuses(changed(src, **{name: zeros}), f"tensor '{name}' holds -1: expected 0, because int8 is read without")


def of_default(**changes):
    config = copy.deepcopy(torchao_config())
    config["quant_type"]["default"] |= changes
    return config


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (torchao_config("Int4WeightOnlyConfig"), "default._type='Int4WeightOnlyConfig': expected 'Int8WeightOnly"),
        (torchao_config("FqnToConfig"), "_type='FqnToConfig': expected"),
        (of_default(_version=1), "quant_type.default._version=1: expected 2"),
        (of_default(_data={}), "_data.granularity._type=None: expected 'PerRow' or 'PerTensor' or 'PerGroup'"),
        (torchao_config("IntxWeightOnlyConfig", "PerAxis", {"axis": 1}), "_data.granularity._data.axis=1: expected 0"),
        (
            torchao_config("IntxWeightOnlyConfig", intx_packing_format={"_data": "OPAQUE_ATEN_KLEIDIAI"}),
            "intx_packing_format._data='OPAQUE_ATEN_KLEIDIAI': expected 'UNPACKED_TO_INT8'",
        ),
        (torchao_config(granularity="PerGroup"), "_data.granularity._data.group_size is missing: expected an integer"),
        (torchao_config(group_size=32), "_data.group_size=32: expected null, because granularity says"),
        (
            torchao_config(weight_dtype={"_data": "float8_e5m2"}),
            "_data.weight_dtype._data='float8_e5m2': expected 'int8'",
        ),
        (torchao_config(packing_format=None), "_data.packing_format._data=None: expected 'PLAIN'"),
        (torchao_config(rotation="hadamard"), "_data.rotation='hadamard': expected nothing, because this argument"),
        ({**torchao_config(), "quant_type": "int8_weight_only"}, "quant_type='int8_weight_only': expected an object"),
        ({**torchao_config(), "untie_embedding_weights": 1}, "untie_embedding_weights=1: expected true or false"),
        ({**torchao_config(), "modules_to_not_convert": [DOWN]}, f"says that '{DOWN}' is not quantised, but"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_config_json_says_is_checked(tmp_path, config, words):
    src = block_checkpoint(tmp_path / "src", KEPT_CODES["torchao int8"])
    rewrite(src, quantization_config=config)
    refuses(src, words)
