"""What is read of a checkpoint whose weights are stored quantised, and what a model of it computes."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fp8_checkpoints import changed, names_in, raw_tensor
from tiny import write_weights

from convert import Refusal, load_folder
from convert.verify import jspec_logits
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.models.params import build
from jspec.quantization.weight import dequantize


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
    module = build(config, {name: jnp.asarray(array) for name, array in params.items()})
    return jspec_logits(module, [rng.integers(97, size=length) for length in (5, 33)])


ENDS = (".qweight", ".qzeros", ".scales", ".g_idx", ".weight_packed", ".weight_scale", ".weight_shape")


def assert_stands_for(params, config, wide):
    """That params are those of a model of floats, bit for bit, those that are quantised once they are dequantised."""
    scales, companions = config.scale_names(), {name: one.end for name, one in config.companions().items()}
    assert params.keys() == wide.keys() | {*scales.values(), *companions.values()}
    for name, array in wide.items():
        found, companion = params[name], params[companions[name]] if name in companions else None
        if name not in scales:
            array = array.astype(found.dtype)
        elif config.quantization == "nvfp4":
            found = dequantize(found, params[scales[name]], array.shape[1], companion)
        else:
            found = dequantize(found, params[scales[name]], array.shape[1])
            array = array if companion is None else array[:, companion]
        np.testing.assert_array_equal(found, array, err_msg=name)


def assert_live_bytes(src):
    """That quantised maps take at most a tenth more than in the files."""
    config, params = load_folder(src)
    scales = config.scale_names()
    kept = [*scales, *scales.values(), *(one.end for one in config.companions().values())]
    size = sum(raw_tensor(src, n).nbytes for n in names_in(src) if n.endswith((*ENDS, "zero_point", "global_scale")))
    assert sum(params[n].nbytes for n in kept) <= 1.1 * size


def rewrite(folder, **keys):
    """Set keys of config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))


def with_plain(folder, *modules: str):
    """The checkpoint with bfloat16 in place of codes for some linear maps."""
    path = folder.with_name(f"{folder.name}-wide")
    wide, changes = {name: raw_tensor(path, name).copy() for name in names_in(path)}, {}
    for module in modules:
        plain = wide[f"{module}.weight"].astype(ml_dtypes.bfloat16)
        changes |= {module + end: None for end in ENDS} | {f"{module}.weight": plain}
        wide[f"{module}.weight"] = plain.astype(np.float32)
    write_weights(path, wide)
    return changed(folder, **changes)


def refuses(src, words):
    """That a checkpoint is refused with ``words`` before any weight is read."""
    with pytest.raises(Refusal) as refusal:
        Checkpoint.open(src).params()
    assert words in str(refusal.value)
