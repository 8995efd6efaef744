"""The devices on which a model is built, where its caller has named them."""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import jax

Device = Any  # ``jax.Device``, which type checkers do not know as a type

_DEVICES: contextvars.ContextVar[tuple[Device, ...] | None] = contextvars.ContextVar("devices", default=None)


@contextlib.contextmanager
def placed_on(devices: Sequence[Device] | None) -> Iterator[None]:
    """Models that are built meanwhile lie on these devices, and what belongs to no model on the first of them. With None
    they lie on those that JAX sees first."""
    if devices is None:
        yield
        return
    token = _DEVICES.set(tuple(devices))
    try:
        with jax.default_device(devices[0]):
            yield
    finally:
        _DEVICES.reset(token)


def named_devices() -> tuple[Device, ...] | None:
    """The devices that a caller has named; None if it has not."""
    return _DEVICES.get()


def first_device() -> Device:
    """The device of a model on one device, and the first of one in shards."""
    return (_DEVICES.get() or jax.devices())[0]
