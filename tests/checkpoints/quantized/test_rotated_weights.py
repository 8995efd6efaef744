"""Rotations that compressed-tensors fuses into weights, as SpinQuant's R1 and R2; those of activations are refused."""

import json

import numpy as np
import pytest
from children import run_library
from fp8_checkpoints import compressed_tensors
from tiny import SMALL, tiny_checkpoint

import jspec
from convert import Refusal
from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.quantized.config import read_quantization

IDS = [3, 9, 1, 14, 28, 7, 7, 0, 21, 5]
READ = ("re:.*q_proj$", "re:.*k_proj$", "re:.*v_proj$", "re:.*up_proj$", "re:.*gate_proj$", "lm_head")
WRITE = ("re:.*embed_tokens$", "re:.*o_proj$", "re:.*down_proj$")


def rotation(first, second, **more):
    """A rotation of the outputs of some maps, and back of the inputs of others, as llm-compressor's SpinQuant writes it."""
    apply = [
        {"targets": list(first), "location": "weight_output"},
        {"targets": list(second), "location": "weight_input", "inverse": True},
    ]
    return {"type": "hadamard", "apply": apply, **more}


FUSED = {"R1": rotation(WRITE, READ), "R2": rotation(["re:.*v_proj$"], ["re:.*o_proj$"], head_dim=32)}
# Rotates, quantises and saves a model by compressed-tensors, and computes the logits of what transformers loads of it.
SCRIPT = """
import json, sys, numpy as np, torch, transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.transform import TransformConfig, apply_transform_config
transforms, ids = json.loads(sys.argv[1])
load = lambda folder: transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
for kind in ("int4", "plain"):
    model = load("src")
    apply_transform_config(model, TransformConfig(config_groups=transforms))
    if kind == "int4":
        apply_quantization_config(model, QuantizationConfig(config_groups={"W4A16": ["Linear"]}, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            args = module.quantization_scheme.weights
            groups = module.weight.unflatten(1, (-1, args.group_size))
            module.weight_scale.data, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(kind)
    compressor.update_config(kind)
    with torch.no_grad():
        np.save(f"{kind}.npy", load(kind)(torch.tensor([ids])).logits[0].numpy())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where ``SCRIPT`` has written ``int4`` and ``plain``, of the model ``src``."""
    pytest.importorskip("compressed_tensors")
    folder = tmp_path_factory.mktemp("rotated")
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    tiny_checkpoint(folder / "src", **sizes, head_dim=32)
    run_library(SCRIPT, folder, [FUSED, IDS])
    return folder


def logits(folder) -> np.ndarray:
    return np.asarray(jspec.load(folder, dtype="float32", **SMALL).logits(IDS))


@pytest.mark.parametrize("kind", ["int4", "plain"])
def test_rotations_that_are_fused_are_read(folder, kind):
    said = json.loads((folder / kind / "config.json").read_text())["quantization_config"]
    assert said["transform_config"]["config_groups"].keys() == FUSED.keys()
    assert ("config_groups" in said) == (kind == "int4")
    wanted = np.load(folder / f"{kind}.npy")
    np.testing.assert_allclose(logits(folder / kind), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    assert np.abs(logits(folder / "src") - wanted).max() > 1e-2 * np.abs(wanted).max()


ONLINE = ("input", "output", "q_attn", "k_cache", 3)
OTHERS = {
    "quantised": compressed_tensors(),
    "cache": {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    "nothing": {"quant_method": "compressed-tensors", "format": "dense"},
}


@pytest.mark.parametrize("location", ONLINE)
@pytest.mark.parametrize("beside", OTHERS)
def test_rotations_of_activations_are_refused(location, beside):
    online = {"type": "hadamard", "apply": [FUSED["R1"]["apply"][0], {"targets": ["Linear"], "location": location}]}
    config = {**OTHERS[beside], "transform_config": {"config_groups": {**FUSED, "R4": online}}}
    words = rf"quantization_config\.transform_config\.config_groups\.R4\.apply\[1\]\.location={location!r}: expected "
    with pytest.raises(Refusal, match=f"config.json: {words}'weight_input' or 'weight_output';"):
        read_quantization(Fields({"quantization_config": config}, "config.json"))
