"""Folders that NVIDIA Model Optimizer itself writes, of a tiny model: what jspec computes with them, beside the tool's own
forward pass before it writes them. Activations, and what is rounded for products in FP8 alone, are not rounded there."""

import json

import numpy as np
import pytest
from children import run_library
from stored_params import assert_same, logits

from convert import convert, load_folder
from jspec.quantization.formats import known_format

# The tool's config -> what it calls the algorithm, and the formats of the down projection and of the maps before it.
CONFIGS = {
    "MXFP8_DEFAULT_CFG": ("MXFP8", "mxfp8", "mxfp8"),
    "INT4_AWQ_CFG": ("W4A16_AWQ", "int4_128_float32_scaled", "int4_128_float32"),
    "W4A8_AWQ_BETA_CFG": ("W4A8_AWQ", "int4_128_float32_scaled", "int4_128_float32"),
    "INT8_WEIGHT_ONLY_CFG": ("W8A16", "int8", "int8"),
}
# How far logits may be, of the largest. In int8 the tool rounds some numbers otherwise when it writes them.
CLOSE = {"INT8_WEIGHT_ONLY_CFG": 1e-3}
WRITE = """
import copy, json, sys, numpy as np, torch, transformers
import modelopt.torch.quantization as mtq
from modelopt.torch.quantization.qtensor import MXFP8QTensor
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers
sizes = {"vocab_size": 97, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 64}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "architectures": ["LlamaForCausalLM"], "initializer_range": 0.1}
prompts = [torch.tensor(ids)[None] for ids in np.load("ids.npz").values()]
for name in map(json.loads, sys.argv[1:]):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=128, dtype="float32")
    model = transformers.LlamaForCausalLM(config).eval()
    wide = copy.deepcopy(model)
    model = mtq.quantize(model, getattr(mtq, name), lambda model: [model(ids) for ids in prompts])
    if name.startswith("MXFP8"):  # whose forward pass needs a GPU
        for end, module in wide.named_modules():
            if end.endswith("proj"):
                stored, scale = MXFP8QTensor.quantize(module.weight.data.clone())
                module.weight.data = stored.dequantize(torch.float32, scale=scale)
    else:
        requantize_resmooth_fused_llm_layers(model)  # as the export does first: maps of the same x get the same numbers
        wide = copy.deepcopy(model)
        for end in ("*input_quantizer", "*weight_quantizer.1") if name.startswith("W4A8") else ():
            mtq.disable_quantizer(wide, end)
    with torch.no_grad():
        np.savez(f"{name}.npz", *(wide(ids).logits[0].numpy() for ids in prompts))
    export_hf_checkpoint(model, export_dir=name)
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder that holds those of the tool, one for each of ``CONFIGS``, and its logits beside them."""
    pytest.importorskip("modelopt")
    folder = tmp_path_factory.mktemp("written")
    rng = np.random.default_rng(0)  # those of ``logits``
    np.savez(folder / "ids.npz", *(rng.integers(97, size=length) for length in (5, 33)))
    run_library(WRITE, folder, *CONFIGS)
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_computes_what_the_tool_computes(written, tmp_path, name):
    algorithm, down, before = CONFIGS[name]
    assert json.loads((written / name / "hf_quant_config.json").read_text())["quantization"]["quant_algo"] == algorithm
    config, params = load_folder(written / name, "float32")
    for layer in range(2):
        assert config.quantization_of(f"layers.{layer}.mlp.down") == config.quantization_of(
            f"layers.{layer}.attention.out"
        )
        assert config.quantization_of(f"layers.{layer}.mlp.down") == down
        assert config.quantization_of(f"layers.{layer}.mlp.gate_up") == before
    for found, wanted in zip(logits(written / name), np.load(written / f"{name}.npz").values(), strict=True):
        assert np.abs(found - wanted).max() < CLOSE.get(name, 1e-5) * np.abs(wanted).max()
    if known_format(down).scaled_inputs:
        assert np.ptp(params["layers.1.mlp.down.input_scale"]) > 0.01
    convert(written / name, tmp_path / "out", "float32", verify="shapes")
    assert_same(load_folder(tmp_path / "out", "float32"), (config, params))
