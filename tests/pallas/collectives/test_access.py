"""Which meshes exchange packets, and what is said of those that do not; and the sum that GPUs are tried with."""

import ctypes
import types

import jax
import numpy as np
import pytest

from jspec.models import sharding
from jspec.models.sharding import ONE_SHOT_OFF, mesh_of, require_sums
from jspec.pallas.collectives import access
from jspec.pallas.collectives.access import reason_against_packets
from jspec.pallas.collectives.peers import room_for
from jspec.pallas.collectives.workspace import Workspace


def gpus(count: int = 2, process: int = 0):
    """A mesh of GPUs, as far as it is asked."""
    devices = [types.SimpleNamespace(platform="gpu", process_index=process, local_hardware_id=i) for i in range(count)]
    return types.SimpleNamespace(devices=np.array(devices, object))


class Driver:
    """As much of the CUDA driver as is asked; ``apart`` are pairs of GPUs that do not reach each other."""

    def __init__(self, apart=(), failing=False):
        self.apart, self.failing, self.asked = apart, failing, []

    def cuDeviceGet(self, into, number):
        into._obj.value = number
        return 0

    def cuDeviceCanAccessPeer(self, into, one, other):
        self.asked.append((one.value, other.value))
        into._obj.value = int((one.value, other.value) not in self.apart)
        return 999 if self.failing else 0


def with_driver(monkeypatch, driver):
    monkeypatch.setattr(access.ctypes, "CDLL", lambda name: driver)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)


def test_gpus_that_reach_each_other_exchange_packets(monkeypatch):
    driver = Driver()
    with_driver(monkeypatch, driver)
    assert reason_against_packets(gpus(3)) is None
    assert len(driver.asked) == 6
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "default")
    assert reason_against_packets(gpus()) is None


@pytest.mark.parametrize("driver", [Driver(apart=[(1, 0)]), Driver(failing=True)], ids=["apart", "failing"])
def test_gpus_that_do_not_reach_each_other(driver, monkeypatch):
    with_driver(monkeypatch, driver)
    reason = reason_against_packets(gpus())
    assert reason is not None
    assert "cannot reach the memory of GPU" in reason


@pytest.mark.parametrize("allocator", ["cuda_async", "platform", "vmm"])
def test_memory_of_other_allocators_is_not_shared(allocator, monkeypatch):
    with_driver(monkeypatch, Driver())
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", allocator)
    assert f"XLA_PYTHON_CLIENT_ALLOCATOR={allocator}" in str(reason_against_packets(gpus()))


def test_without_a_driver_nothing_is_assumed(monkeypatch):
    with_driver(monkeypatch, None)

    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(access.ctypes, "CDLL", missing)
    assert "libcuda.so.1: cannot open" in str(reason_against_packets(gpus()))
    assert ctypes.CDLL is missing


def test_other_devices_and_processes_are_left_to_xla(monkeypatch):
    with_driver(monkeypatch, Driver())
    assert reason_against_packets(mesh_of(2, "x")) == "the devices are no GPUs"
    assert reason_against_packets(gpus(process=1)) == "the GPUs belong to several processes"


def test_workspaces_are_for_one_process():
    with pytest.raises(ValueError, match="a workspace is for GPUs of one process"):
        Workspace.create(gpus(process=1), room_for(64, "float32", 2))


def test_devices_that_add_up_are_accepted():
    require_sums(mesh_of(4, "x"))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_gpus_are_tried_before_they_share_a_target(platform, monkeypatch):
    tried = []
    devices = [types.SimpleNamespace(platform=platform, id=i) for i in range(2)]
    monkeypatch.setattr(sharding.jax, "devices", lambda: devices)
    monkeypatch.setattr(sharding, "Mesh", lambda devices, axes: (len(devices), axes))
    monkeypatch.setattr(sharding, "require_sums", tried.append)
    assert mesh_of(2, "x") == (2, ("x",))
    assert tried == ([(2, ("x",))] if platform == "gpu" else [])
    assert mesh_of(1, "x") == (1, ("x",))
    assert len(tried) <= 1


def test_a_sum_that_fails_says_what_to_set(monkeypatch):
    mesh = mesh_of(2, "x")

    def broken(*_, **__):
        raise jax.errors.JaxRuntimeError("INTERNAL: ncclGetPeerDevicePointer: unhandled system error\nmore")

    monkeypatch.setattr(sharding.jax, "jit", lambda function: broken)
    with pytest.raises(RuntimeError, match=r"a sum over 2 GPUs failed .*unhandled system error") as error:
        require_sums(mesh)
    assert f"XLA_FLAGS={ONE_SHOT_OFF}" in str(error.value)
    assert "more)" not in str(error.value)


def test_a_wrong_sum_is_refused(monkeypatch):
    mesh = mesh_of(2, "x")
    monkeypatch.setattr(sharding.jax, "jit", lambda function: lambda: 1.0)
    with pytest.raises(RuntimeError, match="a sum of ones over 2 GPUs is 1"):
        require_sums(mesh)
