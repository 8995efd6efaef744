"""For tests of exchanges between GPUs: an exchange without GPUs, and functions of two real ones."""

import re

import jax
import jax.numpy as jnp
import pytest
from cuda_lowering import code_of

from jspec.models.sharding import mesh_of
from jspec.pallas.collectives.workspace import Exchange, Room

AXIS = "model"


def needs(gpus: int):
    """The mark of tests on so many real GPUs."""
    few = jax.default_backend() != "gpu" or len(jax.devices()) < gpus
    return pytest.mark.skipif(few, reason=f"packets need {gpus} GPUs")


GPUS = [pytest.param(n, marks=needs(n), id=f"{n}-gpus") for n in (2, 4, 8)]  # of tests that any number may run


def exchange_of(n: int, room: Room, blocks: int) -> Exchange:
    """Of n GPUs whose memory is nowhere."""
    return Exchange(jnp.zeros((n, 2), jnp.int32), jnp.ones(blocks, jnp.int32), room)


def over_devices(function, in_specs, out_specs, gpus: int = 2):
    """A function of the inside of a ``jax.shard_map`` over so many devices, compiled."""
    mesh = mesh_of(gpus, AXIS)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def assert_epochs_are_read_before_they_are_counted(lowered: str):
    """Both lie in the same memory: a thread that reads behind the store of another one would be an exchange ahead."""
    for name, code in code_of(lowered):
        order = re.findall(r"tt\.load|gpu\.barrier|tt\.store", code)
        assert order[:3] == ["tt.load", "tt.load", "gpu.barrier"], name  # of the rank, and of the epoch
