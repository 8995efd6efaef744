"""The public functions lower to Triton kernels for CUDA on a machine without a GPU, and to their twins elsewhere."""

import contextlib
import re

import jax
import jax.numpy as jnp
import pytest

from jspec.pallas.draw import draw
from jspec.pallas.residual import Rows, residual_draw, residual_mass
from jspec.pallas.threshold import threshold

R, B, K = 10, 2, 4


def _shapes(V, dtype):
    """name -> (public function, arguments, kernels expected)."""
    array = jax.ShapeDtypeStruct
    f32 = lambda *shape: array(shape, jnp.float32)  # noqa: E731
    i32 = lambda *shape: array(shape, jnp.int32)  # noqa: E731
    flag = lambda *shape: array(shape, jnp.bool_)  # noqa: E731
    keys = lambda rows: array((rows, 2), jnp.uint32)  # noqa: E731
    laws = lambda J, width: Rows(array((B, J, width), dtype), f32(B, J), f32(B, J), f32(B, J))  # noqa: E731
    logits, p, q = array((R, V), dtype), laws(K + 1, V), laws(K, V - V // 4)
    return {
        "draw": (draw, (logits, f32(R), f32(R), keys(R), flag(R)), {"draw_block", "draw_merge"}),
        "draw without noise": (draw, (logits, f32(R), f32(R)), {"draw_block", "draw_merge"}),
        "threshold": (threshold, (logits, f32(R), i32(R), f32(R), f32(R)), {"threshold_row"}),
        "residual_mass": (residual_mass, (p, q, f32(B, K)), {"mass_block"}),
        "residual_draw": (
            residual_draw,
            (p, q, i32(B), f32(B), flag(B), i32(B), keys(B), flag(B)),
            {"residual_block", "residual_merge"},
        ),
    }


def _h200():
    """jax 0.11 wants to know the device that it lowers for; 0.10 does not ask."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("V", [128256, 1031])
@pytest.mark.parametrize("name", _shapes(1031, "float32"))
def test_lowers_for_cuda(name, V, dtype):
    function, args, kernels = _shapes(V, jnp.dtype(dtype))[name]
    with _h200():
        text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == len(kernels)
    assert set(re.findall(r'name = "jspec_(\w+)"', text)) == kernels


@pytest.mark.parametrize("name", _shapes(1031, "float32"))
def test_lowers_to_the_twin_elsewhere(name):
    function, args, _ = _shapes(1031, jnp.dtype("float32"))[name]
    assert "triton" not in jax.jit(function).trace(*args).lower(lowering_platforms=("cpu",)).as_text()
