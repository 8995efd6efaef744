"""Single maps in floats among those of eight bits with a scale for each output channel or weight: the tensors decide."""

import ml_dtypes
import numpy as np
import pytest
from fp8_checkpoints import changed, compressed_tensors, fp8_checkpoint, raw_tensor, vllm_fp8
from packed_weights import model_optimizer_config
from stored_params import assert_same
from tiers import in_tiers

from convert import convert, load_folder
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.config.model_fields import PLAIN_HEAD
from jspec.quantization.formats import known_format

DOWN, V = "model.layers.0.mlp.down_proj", "model.layers.0.self_attn.v_proj"


def of_model_optimizer(ignored) -> dict:
    # The helper that writes checkpoints asks config_groups what has a scale.
    groups = {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}, "targets": ["Linear"]}}
    return model_optimizer_config("FP8", ignore=list(ignored), config_groups=groups)


SAID = {
    "fp8": lambda ignored: compressed_tensors(ignore=ignored),
    "int8": lambda ignored: compressed_tensors(format="int-quantized", weights__type="int", ignore=ignored),
    "vllm": vllm_fp8,
    "modelopt": of_model_optimizer,
}
pytestmark = pytest.mark.filterwarnings("ignore:.*are dequantised as they are read:UserWarning")
METHODS = in_tiers(SAID, test=["int8", "modelopt"])


def with_plain(folder, *modules: str):
    """The checkpoint with bfloat16 in place of numbers and scales for some maps."""
    changes = {}
    for module in modules:
        wide = raw_tensor(folder, f"{module}.weight").astype(np.float32)
        changes |= {f"{module}.weight_scale": None, f"{module}.weight": wide.astype(ml_dtypes.bfloat16)}
    return changed(folder, **changes)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("modules", "plain"),
    [((DOWN,), ("layers.0.mlp.down",)), ((V,), ("layers.0.attention.qkv",)), ((), ())],
    ids=["a map", "a part of one", "the output head alone"],
)
def test_a_list_need_not_name_them(tmp_path, method, modules, plain):
    src = with_plain(fp8_checkpoint(tmp_path / "src", quantization=SAID[method]([])), *modules)
    kind = "int8" if method == "int8" else "fp8"
    found = config, params = load_folder(src)
    assert (config.quantization, dict(config.other_formats)) == (kind, dict.fromkeys((*plain, "head")))
    assert config == Checkpoint.open(src).target_config
    for name in ("layers.0.mlp.down", "layers.0.attention.qkv", "layers.1.mlp.down", "head"):
        is_plain = name in plain or name == "head"
        assert params[f"{name}.weight"].dtype == (ml_dtypes.bfloat16 if is_plain else known_format(kind).numbers)
    convert(src, tmp_path / "out", verify="shapes")
    assert_same(load_folder(tmp_path / "out"), found)


@pytest.mark.parametrize("method", METHODS)
def test_a_list_may_name_a_router_of_each_layer(tmp_path, method):
    """As beginnings of names, of which a mixture has many."""
    named = "model.layers.{}.mlp.gate*" if method == "modelopt" else "re:model.layers.{}.mlp.gate.*"
    listed = ["lm_head", *map(named.format, range(60))]
    config, params = load_folder(
        fp8_checkpoint(tmp_path / "src", "Qwen3MoeForCausalLM", quantization=SAID[method](listed))
    )
    kind = "int8" if method == "int8" else "fp8"
    assert (config.quantization, config.other_formats) == (kind, PLAIN_HEAD)  # where gate_proj begins as gate does, too
    assert params["layers.1.mlp.gate_up.weight"].dtype == known_format(kind).numbers
