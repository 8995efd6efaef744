"""Kernel or reference implementation, decided when a program is lowered, by the platform that it is lowered for."""

import functools
from collections.abc import Callable

import jax

_HOPPER = "H100", "H200", "H800", "H20", "GH200"


def by_platform(kernel: Callable, reference: Callable, *args):
    """``kernel(*args)`` in a program for an NVIDIA GPU, ``reference(*args)`` in any other."""
    return jax.lax.platform_dependent(*args, cuda=kernel, default=reference)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def differentiable(kernel: Callable, reference: Callable, *args):
    """``by_platform`` with the derivative of the reference implementation. A kernel by itself has none."""
    return by_platform(kernel, reference, *args)


@differentiable.defjvp
def _(kernel: Callable, reference: Callable, primals, tangents):
    del kernel
    return jax.jvp(reference, primals, tangents)


def on_hopper() -> bool:
    """Whether programs are lowered for a Hopper GPU: the device of the mesh in use, or else the default one, is one."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None) or jax.devices()[0]
    return any(name in device.device_kind for name in _HOPPER)
