"""JAX's settings that a ``with`` changes for one thread alone, which the engine's thread has to share with its callers."""

import contextlib
import threading
from typing import Any

import jax

# Each is ``jax.config.jax_NAME``, and ``jax.NAME`` is the ``with`` that sets it.
NAMES = (
    "default_device",
    "default_matmul_precision",
    "enable_x64",
    "debug_nans",
    "debug_infs",
    "disable_jit",
    "numpy_rank_promotion",
    "numpy_dtype_promotion",
    "transfer_guard_host_to_device",
    "transfer_guard_device_to_host",
    "transfer_guard_device_to_device",
)
_ATTRIBUTES = tuple(f"jax_{name}" for name in NAMES)

View = tuple[Any, ...]  # a value for each of ``NAMES``


def view() -> View:
    """The settings as this thread has them. This takes about two microseconds."""
    config = jax.config
    return tuple([getattr(config, name) for name in _ATTRIBUTES])


def with_default_device(settings: View, device: Any) -> View:
    """The settings with another default device."""
    return tuple([device if name == "default_device" else value for name, value in zip(NAMES, settings, strict=True)])


def of_this_thread_alone() -> dict[str, Any]:
    """The settings, by name, that this thread has otherwise than a thread that begins now."""
    views: list[View] = []
    other = threading.Thread(target=lambda: views.append(view()), name="jspec.settings")
    other.start()
    other.join()
    return {name: own for name, own, new in zip(NAMES, view(), views[0], strict=True) if own != new}


def applied(settings: dict[str, Any]) -> contextlib.ExitStack:
    """A ``with`` in which this thread has these settings."""
    with contextlib.ExitStack() as stack:
        for name, value in settings.items():
            stack.enter_context(getattr(jax, name)(value))
        return stack.pop_all()


def require_same(caller: View, engine: View):
    """Refuse a caller whose settings are not those of the engine's thread.

    Raises:
      ValueError: a setting differs; the message names it.
    """
    for name, asked, has in zip(NAMES, caller, engine, strict=True):
        if asked != has:
            raise ValueError(
                f"jax_{name}={asked!r} in this thread: the engine's thread has {has!r}, and decodes for all callers; set it "
                f'for all threads with jax.config.update("jax_{name}", {asked!r}), or with jax.{name}() around jspec.load()'
            )
