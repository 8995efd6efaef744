"""Checkpoints of several formats that the tools themselves write: jspec's logits are those of the tool.

compressed-tensors, with which llm-compressor writes, computes with rounded weights in float32 before it packs them. NVIDIA
Model Optimizer does not on a CPU, so its tensors are dequantised one by one, those of NVFP4 by its own class.

AutoRound and GPTQModel are no part of the extra ``parity``: ``mixed_checkpoints`` writes tensors and keys as folders of
AutoRound 0.16.1 with ``extra_config`` and of GPTQModel 7.6.0 with ``dynamic`` have them."""

import dataclasses
import importlib.util

import numpy as np
import pytest
from children import run_library
from fp8_checkpoints import compressed_tensors
from mixed_checkpoints import groups
from packed_weights import auto_round_floats, fp8_config, mxfp4_config, mxfp8_config, nvfp4_config, pack_config
from tiny import SMALL

import jspec
from convert import load_folder
from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.quantized.config import read_quantization
from jspec.checkpoints.quantized.format import BlockFormat
from jspec.checkpoints.quantized.mixed import Mixed
from jspec.checkpoints.quantized.scaled import Scaled

LLAMA = """
import numpy as np, torch, transformers
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=256, initializer_range=0.1, bos_token_id=1, eos_token_id=2
)
model, ids = transformers.LlamaForCausalLM(config).float().eval(), torch.arange(3, 40)[None]
"""
COMPRESSED_TENSORS = """
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization import apply_quantization_config
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, is_module_quantized
fp8 = QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
nvfp4 = preset_name_to_scheme("NVFP4A16", ["Linear"]).weights
int4, int8 = (
    QuantizationArgs(num_bits=bits, type="int", strategy="group", group_size=32, symmetric=True) for bits in (4, 8)
)
groups = {
    "attention": (fp8, ["re:.*self_attn\\\\.(q|k|v|o)_proj$"]),
    "mlp": (nvfp4, ["re:.*mlp.*", "model.layers.1.mlp.down_proj"]),
    "int4": (int4, ["re:.*layers.1.mlp.(gate|up|down)_proj"]),
    "head": (int8, ["lm_head", "re:.*layers.1.self_attn.v_proj"]),
}
groups = {name: QuantizationScheme(targets=targets, weights=weights) for name, (weights, targets) in groups.items()}
ignored = ["re:.*layers.1.self_attn.o_proj"]
known = QuantizationConfig(config_groups=groups, quantization_status="frozen", ignore=ignored)
apply_quantization_config(model, known)
for module in filter(is_module_quantized, model.modules()):
    weight, how, more = module.weight.data, module.quantization_scheme.weights, {}
    if how.strategy == "tensor_group":
        module.weight_global_scale.data.copy_((448 * 6 / weight.abs().max()).reshape(1))
        more["global_scale"] = module.weight_global_scale.data
    by_channel = how.strategy == "channel"
    numbers = weight if by_channel else weight.reshape(len(weight), -1, how.group_size)
    ends = numbers.amin(-1, keepdim=by_channel), numbers.amax(-1, keepdim=by_channel)
    scale, _ = calculate_qparams(*ends, how, **more)
    module.weight_scale.data.copy_(scale)
with torch.no_grad():
    np.save("logits.npy", model(ids).logits[0].numpy())
compressor = ModelCompressor.from_pretrained_model(model)
compressor.compress_model(model)
model.save_pretrained("src")
compressor.update_config("src")
"""
MODEL_OPTIMIZER = """
import modelopt.torch.quantization as quantization
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import load_file
model.config.architectures = ["LlamaForCausalLM"]
fp8, nvfp4 = {"num_bits": (4, 3)}, {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
rules = [{"quantizer_name": "*", "enable": False}]
rules += [{"quantizer_name": f"*self_attn*{one}_quantizer", "cfg": {**fp8, "axis": None}} for one in ("weight", "input")]
rules += [{"quantizer_name": "*layers.1.mlp*weight_quantizer", "cfg": nvfp4}]
rules += [{"quantizer_name": "*layers.0.mlp.down_proj*weight_quantizer", "cfg": {**fp8, "axis": 0}}]
by_token = {**fp8, "type": "dynamic", "block_sizes": {-1: None}}
rules += [{"quantizer_name": "*layers.0.mlp.down_proj*input_quantizer", "cfg": by_token}]
quantized = quantization.quantize(model, {"quant_cfg": rules, "algorithm": "max"}, lambda model: model(ids))
export_hf_checkpoint(quantized, dtype=torch.float32, export_dir="src")
stored, plain = load_file("src/model.safetensors"), {}
for name, tensor in stored.items():
    scale, overall = stored.get(f"{name}_scale"), stored.get(f"{name}_scale_2")
    if overall is not None:
        packed = NVFP4QTensor(torch.Size([len(tensor), 2 * tensor.shape[1]]), torch.float32, tensor)
        plain[name] = packed.dequantize(torch.float32, scale=scale, double_scale=overall, block_sizes={-1: 16})
    elif name.endswith(("norm.weight", ".weight")):
        plain[name] = tensor.float() * (1 if scale is None else scale.reshape(-1, 1) if scale.ndim else scale)
model = transformers.LlamaForCausalLM(config).float().eval()
model.load_state_dict(plain)
with torch.no_grad():
    np.save("logits.npy", model(ids).logits[0].numpy())
"""
WRITERS = {
    "compressed_tensors": (COMPRESSED_TENSORS, {"fp8", "nvfp4", "int4_32_float32", "int8_32_float32", None}),
    "modelopt": (MODEL_OPTIMIZER, {"fp8", "nvfp4", None}),
}


@pytest.mark.filterwarnings(
    "ignore:.*v_proj, stored in eight bits .* are dequantised:UserWarning"
)  # beside q_proj in FP8
@pytest.mark.parametrize("library", ["compressed_tensors", pytest.param("modelopt", marks=pytest.mark.nightly)])
def test_logits_are_those_of_the_tool(tmp_path, library):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    script, expected = WRITERS[library]
    run_library(LLAMA + script, tmp_path)
    wanted = np.load(tmp_path / "logits.npy")
    config, _ = load_folder(tmp_path / "src")
    assert {form for _, form in config.other_formats} | {config.quantization} == expected
    found = np.asarray(jspec.load(tmp_path / "src", dtype="float32", **SMALL).logits(list(range(3, 40))))
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()


AUTO_ROUND = {
    "mxfp4": (auto_round_floats("mx_fp", 4, 32, "auto_round:llm_compressor"), mxfp4_config()),
    "mxfp8": (auto_round_floats("mx_fp", 8, 32, "auto_round:llm_compressor"), mxfp8_config()),
    "nvfp4": (auto_round_floats("nv_fp", 4, 16, "auto_round:llm_compressor"), nvfp4_config()),
    "fp8 blocks": (
        auto_round_floats("fp", 8, [128, 128], "auto_round:fp8", fmt="e4m3", weight_block_size=[128, 128]),
        fp8_config(weight_block_size=[128, 128]),
    ),
    "fp8 channel": (auto_round_floats("fp", 8, -1, "auto_round:fp8_static", fmt="e4m3"), compressed_tensors()),
    "fp8 tensor": (auto_round_floats("fp", 8, 0, None, fmt="e4m3"), compressed_tensors("tensor")),
}


@pytest.mark.parametrize("name", AUTO_ROUND)
def test_floats_of_auto_round_are_in_formats_of_others(name):
    """As AutoRound 0.16.1 wrote them of a tiny model: tensors of the same names, dtypes and shapes as in the others, but for
    scales of channels ``[out]``, which all take. Settings of single modules, too."""
    own, other = AUTO_ROUND[name]
    found, wanted = (read_quantization(Fields({"quantization_config": each}, "config.json")) for each in (own, other))
    assert isinstance(found, BlockFormat)
    assert dataclasses.replace(found, plain=wanted.plain, **_modules(wanted)) == wanted
    if name == "mxfp4":
        own = {
            **own,
            "extra_config": {"model.layers.1.mlp.up_proj": {"bits": 8, "act_bits": 8}, "lm_head": {"bits": 16}},
        }
        mixed = read_quantization(Fields({"quantization_config": own}, "config.json"))
        assert isinstance(mixed, Mixed)
        forms = [mixed.of_module(f"model.layers.{i}.mlp.up_proj", {}).form.name for i in range(2)]
        assert forms == ["mxfp4", "mxfp8"]


def _modules(form) -> dict:
    """Which modules are quantised, of a format that says it."""
    return {"targets": form.targets, "ignored": form.ignored} if isinstance(form, Scaled) else {}


def test_groups_are_found_in_the_order_of_the_library():
    """Names before patterns, those in the order of their letters, and classes last; the last group of a target counts."""
    torch = pytest.importorskip("torch")
    match = pytest.importorskip("compressed_tensors.utils.match")
    names = [
        f"model.layers.{i}.{part}" for i in range(2) for part in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")
    ]
    targets = ["Linear", names[0], names[4], r"re:.*mlp\..*", "re:.*layers.0.*", "re:.*down_proj$", "re:model.*up"]
    configs = {"int4_32": pack_config(group_size=32), "int4_64": pack_config(group_size=64), "nvfp4": nvfp4_config()}
    rng, compared = np.random.default_rng(0), 0
    for _ in range(200):
        each = [list(rng.permutation(targets)[: rng.integers(1, 4)]) for _ in configs]
        of_target = {target: config for config, listed in zip(configs.values(), each, strict=True) for target in listed}
        written = groups(*zip(configs.values(), each, strict=True))
        stored = read_quantization(Fields({"quantization_config": written}, "config.json"))
        for name in names if isinstance(stored, Mixed) else ():
            found = match.match_targets(name, torch.nn.Linear(1, 1), of_target)
            wanted = of_target[found[0]]["config_groups"]["group_0"]["weights"]["group_size"] if found else None
            form = stored.of_module(name, {})
            size = None if form is None else getattr(form, "grouping", (16,))[0]
            assert size == wanted, (name, each)
            compared += 1
    assert compared > 500
