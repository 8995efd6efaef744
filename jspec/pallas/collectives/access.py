"""Whether the GPUs of a mesh can store into each other's memory."""

import ctypes
import itertools
import os

import jax
from jax.sharding import Mesh

_ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
_SHARED = ("", "default", "bfc")  # allocators whose memory XLA lets the other GPUs of its process use


def reason_against_packets(mesh: Mesh) -> str | None:
    """Why sums over the devices of a mesh cannot be made of packets; None if they can."""
    devices = list(mesh.devices.flat)
    if any(device.platform != "gpu" for device in devices):
        return "the devices are no GPUs"
    if any(device.process_index != jax.process_index() for device in devices):
        return "the GPUs belong to several processes"
    allocator = os.environ.get(_ALLOCATOR, "").lower()
    if allocator not in _SHARED:
        return f"{_ALLOCATOR}={allocator} has memory that other GPUs may not use; leave it unset"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"the CUDA driver cannot be asked whether the GPUs reach each other: {error}"
    for one, other in itertools.permutations(devices, 2):
        if not _reaches(driver, one.local_hardware_id, other.local_hardware_id):
            return f"GPU {one.local_hardware_id} cannot reach the memory of GPU {other.local_hardware_id}"
    return None


def _reaches(driver, one: int, other: int) -> bool:
    answer, first, second = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_int(0)
    failed = driver.cuDeviceGet(ctypes.byref(first), one) or driver.cuDeviceGet(ctypes.byref(second), other)
    failed = failed or driver.cuDeviceCanAccessPeer(ctypes.byref(answer), first, second)
    return not failed and bool(answer.value)
