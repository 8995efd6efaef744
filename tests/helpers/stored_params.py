"""What is read of a checkpoint whose weights are stored quantised, and what a model of it computes."""

import json
import re

import jax
import ml_dtypes
import numpy as np
import pytest
from block_checkpoints import KEPT, KEPT_CODES, block_checkpoint
from fp8_checkpoints import KINDS, changed, fp8_checkpoint, names_in, raw_tensor, stored_in
from tiny import write_weights

from convert import Refusal, load_folder
from convert.verify import jspec_logits
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.models.params import build
from jspec.quantization.formats import known_format
from jspec.quantization.weight import Weight

FORMATS = {**KEPT, **KEPT_CODES}


def stored_checkpoint(path, name: str, architecture: str = "LlamaForCausalLM", **options):
    """A random checkpoint in a format that is loaded as it is stored, and beside it, as ``<name>-wide``, the float32 one.

    Latents have several groups of inputs."""
    if name in KINDS:
        quantization = KINDS[name] | ({"ignore": []} if options.get("head") else {})
        return fp8_checkpoint(path, architecture, quantization=quantization, **options)
    if name in KEPT_CODES and architecture == "DeepseekV3ForCausalLM":
        group = max(known_format(KEPT_CODES[name].words).group or 32, 32)
        options = {"kv_lora_rank": 3 * group, "q_lora_rank": group, "v_head_dim": 3 * group // 4, **options}
    return block_checkpoint(path, FORMATS[name], architecture, **options)


def form_of(name: str) -> str:
    """What the weights of ``stored_checkpoint`` are loaded as."""
    return stored_in(name) if name in KINDS else "fp8_block" if name in KEPT else KEPT_CODES[name].words


def assert_same(found, wanted):
    """That two tuples of config and params are equal, bit for bit."""
    (config, params), (other, expected) = found, wanted
    assert config == other
    assert params.keys() == expected.keys()
    for name, array in params.items():
        assert array.dtype == expected[name].dtype
        np.testing.assert_array_equal(array.view(np.uint8), expected[name].view(np.uint8), err_msg=name)


def logits(folder) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    config, params = load_folder(folder, "float32")
    module = build(config, jax.device_put(params))
    return jspec_logits(module, [rng.integers(97, size=length) for length in (5, 33)])


def assert_stands_for(params, config, wide):
    """That params are those of a model of floats, bit for bit, those that are quantised once they are dequantised."""
    quantized, wide = config.stored_params(), with_shared_apart(with_values_apart(wide, config), config)
    assert params.keys() == wide.keys() | {param for stored in quantized.values() for param in stored.names.values()}
    for name, array in wide.items():
        found, stored = params[name], quantized.get(name)
        if stored is None:
            array = array.astype(found.dtype)
        else:
            arrays = {part: params[param] for part, param in stored.names.items()}
            found = Weight.of(arrays, stored.form, stored.shape[1]).dequantize()
        np.testing.assert_array_equal(found, array, err_msg=name)


def with_values_apart(params, config) -> dict:
    """The params with queries and keys, values and gates where ``config`` has the values of a layer apart."""
    found, config = dict(params), getattr(config, "decoder", config)
    for values in (name for name in config.param_shapes() if ".attention.values." in name and config.latent is None):
        layer, name = config.layer(int(values.split(".")[1])), values.replace(".values.", ".qkv.")
        start = (config.num_heads + layer.num_kv_heads) * layer.head_dim
        keys, found[values], gates = np.split(params[name], [start, start + layer.num_kv_heads * layer.head_dim])
        found[name] = np.concatenate([keys, gates])
    return found


def with_shared_apart(params, config) -> dict:
    """The params with shared experts as one MLP, where ``config`` has them so and not among the other experts."""
    found, config = dict(params), getattr(config, "decoder", config)
    for shared in (name for name in config.param_shapes() if ".mlp.shared." in name and name not in params):
        name, experts = shared.replace(".shared.", "."), config.experts
        rows = params[name].shape[0] * experts.width * experts.count
        found[name], own = np.split(params[name], [rows // (experts.count * experts.width + experts.shared_width)])
        maps = own.reshape(experts.shared_width // experts.width, -1, experts.width, config.hidden_size).swapaxes(0, 1)
        if name.endswith("down.weight"):
            maps = own.reshape(-1, config.hidden_size, experts.width).swapaxes(0, 1)
        found[shared] = maps.reshape(config.param_shapes()[shared])
    return found


def rewrite(folder, **keys):
    """Set keys of config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))


def with_plain(folder, modules: str):
    """The checkpoint with bfloat16 in place of what is stored for the linear maps whose names match."""
    path = folder.with_name(f"{folder.name}-wide")
    wide, changes = {name: raw_tensor(path, name).copy() for name in names_in(path)}, {}
    for name in [name for name in wide if re.fullmatch(rf"{modules}\.weight", name)]:
        plain, parts = wide[name].astype(ml_dtypes.bfloat16), name.removesuffix("weight")
        changes |= {part: None for part in names_in(folder) if part.startswith(parts)} | {name: plain}
        wide[name] = plain.astype(np.float32)
    assert changes
    write_weights(path, wide)
    return changed(folder, **changes)


def refuses(src, words):
    """That a checkpoint is refused with ``words`` before any weight is read."""
    with pytest.raises(Refusal) as refusal:
        Checkpoint.open(src).params()
    assert words in str(refusal.value)
