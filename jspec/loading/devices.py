"""The devices that a call of ``jspec.load`` names."""

import contextlib
from collections.abc import Sequence

import jax

from jspec._validation import require
from jspec.models.placement import Device, placed_on


def on_devices(
    devices: Sequence[Device] | None, mesh: jax.sharding.Mesh | None, count: int
) -> contextlib.AbstractContextManager[None]:
    """A ``with`` in which a model is built on these devices; arguments and errors as for ``_named``."""
    return placed_on(_named(devices, mesh, count))


def _named(devices: Sequence[Device] | None, mesh: jax.sharding.Mesh | None, count: int) -> list[Device] | None:
    """The devices of ``devices`` or of ``mesh``; None if neither is given.

    Args:
      devices, mesh: as ``jspec.load`` has them.
      count: how many a model needs, ``tensor_parallel``.

    Raises:
      TypeError: both are given.
      ValueError: they are no devices, or not as many as the model needs, or not of this process and JAX's default backend.
    """
    if devices is not None and mesh is not None:
        raise TypeError("load(): 'devices' and 'mesh' both say where the model lies; give one of them")
    if mesh is not None:
        require(isinstance(mesh, jax.sharding.Mesh), "mesh", mesh, "a jax.sharding.Mesh")
        name, given = "mesh", list(mesh.devices.flat)
    elif devices is not None:
        known = isinstance(devices, Sequence) and all(isinstance(device, jax.Device) for device in devices)
        require(known, "devices", devices, "a list of jax.Device, as jax.devices() has them")
        name, given = "devices", list(devices)
    else:
        return None
    if len(given) != count:
        fix = f"; load with tensor_parallel={len(given)}" if len(given) > 1 else ""
        raise ValueError(f"{name} has {len(given)} devices: expected {count}, which is tensor_parallel{fix}")
    if len(set(given)) != count:
        raise ValueError(f"{name}={given}: expected each device once")
    here = jax.local_devices()
    strange = next((device for device in given if device not in here), None)
    if strange is not None or jax.process_count() > 1:
        raise ValueError(
            f"{name}={given}: expected devices among jax.local_devices(), {here}, in a program of one process"
        )
    return given
