"""Kernel or reference implementation, decided when a program is lowered: by the platform it is lowered for, never by
global state."""

from collections.abc import Callable

import jax


def by_platform(kernel: Callable, reference: Callable, *args):
    """``kernel(*args)`` in a program for an NVIDIA GPU, ``reference(*args)`` in any other."""
    return jax.lax.platform_dependent(*args, cuda=kernel, default=reference)
