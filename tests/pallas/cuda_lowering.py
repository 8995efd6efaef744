"""Programs lowered for an H200 on a machine without a GPU, and the kernels in them."""

import contextlib
import re

import jax


def h200():
    """jax 0.11 wants to know the device that it lowers for; 0.10 does not ask."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device))


def for_cuda(function, args) -> str:
    """What ``function`` of arguments of these shapes is lowered to."""
    with h200():
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def kernels_of(text: str) -> list[str]:
    """The names of the kernels in a lowered program, all of which are jspec's."""
    names = re.findall(r'name = "jspec_(\w+)"', text)
    assert text.count("@__gpu$xla.gpu.triton") == len(names)
    return names
