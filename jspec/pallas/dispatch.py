"""Kernel or reference implementation, decided when a program is lowered, by the platform that it is lowered for."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import jax

_ONE_ORDER = contextvars.ContextVar("one_order", default=False)
# A part of the keys of JAX's caches, so that no trace is found that was made for another platform.
_PLATFORM = jax.make_user_context(None)
_HOPPER = "H100", "H200", "H800", "H20", "GH200"


def by_platform(kernel: Callable, reference: Callable, *args, supported: bool = True, **options):
    """``kernel`` of the arguments in a program for an NVIDIA GPU, and ``reference`` of them in any other, or in all if the
    kernel does not support them."""
    if options:
        kernel, reference = (functools.partial(function, **options) for function in (kernel, reference))
    return of_platform(*args, cuda=kernel, default=reference) if supported else reference(*args)


def of_platform(*args, default: Callable, **functions: Callable):
    """``jax.lax.platform_dependent``, which traces one function alone where ``traced_for_backend`` says which."""
    if _PLATFORM.value is None:
        return jax.lax.platform_dependent(*args, default=default, **functions)
    return functions.get(_PLATFORM.value, default)(*args)


@contextlib.contextmanager
def traced_for_backend() -> Iterator[None]:
    """What is traced meanwhile is lowered for JAX's default backend alone: no function of another platform is traced, which
    would take as long as the ones that count. Where a default device of another platform is set, all are traced."""
    default, client = getattr(jax.config, "jax_default_device", None), jax.devices()[0].client
    same = default is None or getattr(default, "client", None) is client
    known = "cpu" if client.platform == "cpu" else "cuda" if "cuda" in client.platform_version else None
    with _PLATFORM(known if same else None):
        yield


def differentiable(kernel: Callable, reference: Callable, *args, **options):
    """``by_platform`` with the derivative of the reference implementation. A kernel by itself has none."""
    if options:
        kernel, reference = (functools.partial(function, **options) for function in (kernel, reference))
    return _differentiable(kernel, reference, *args)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _differentiable(kernel: Callable, reference: Callable, *args):
    return by_platform(kernel, reference, *args)


@_differentiable.defjvp
def _(kernel: Callable, reference: Callable, primals, tangents):
    del kernel
    return jax.jvp(reference, primals, tangents)


def on_hopper() -> bool:
    """Whether programs are lowered for a Hopper GPU: the device of the mesh in use, or else the default one, is one."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None) or jax.devices()[0]
    return any(name in device.device_kind for name in _HOPPER)


class Row:
    """A row of a table of kernels: a way to compute some cases, each described by one or more arguments.

    Attributes:
      name: what the row is.
      conditions: what it asks of a case: whether that is so, and what to say if it is not.
      order: the name of its order of sums on a GPU, if that is the same for any number of tokens; else None. Rows of one
        name give the same bits.
      cpu_order: the same of its reference implementation on a CPU.
    """

    name: str
    conditions: Callable[..., Iterator[tuple[bool, str]]]
    order: str | None = None
    cpu_order: str | None = "reference"

    def order_on(self, platform: str) -> str | None:
        """The name of its order of sums in programs for a platform."""
        return self.cpu_order if platform == "cpu" else self.order

    def refusal(self, *case) -> str | None:
        """Why the row is not for a case in programs for this machine's GPU, in words; None if it is."""
        return next((reason for holds, reason in self.conditions(*case) if not holds), None)


@dataclasses.dataclass(frozen=True)
class KernelRow(Row):
    """A row for one kernel, with its conditions as a function."""

    name: str
    kernel: Callable
    conditions: Callable[..., Iterator[tuple[bool, str]]]
    order: str | None = None
    cpu_order: str | None = "reference"

    def serves(self, *case) -> bool:
        """Whether the kernel can be used for a case."""
        return self.refusal(*case) is None


AnyRow = TypeVar("AnyRow", bound=Row)


@contextlib.contextmanager
def one_order(wanted: bool = True) -> Iterator[None]:
    """What is traced meanwhile has kernels that give a token the same bits among any number of tokens, where there are such
    kernels: some are slower than others."""
    token = _ONE_ORDER.set(wanted)
    try:
        yield
    finally:
        _ONE_ORDER.reset(token)


def wants_one_order() -> bool:
    """Whether ``one_order`` is in force."""
    return _ONE_ORDER.get()


def row_of(table: Sequence[AnyRow], case, one_order: bool = False) -> AnyRow:
    """The first row of a table that serves a case; of those with an ``order``, if one of them does and it is wanted."""
    rows = (*(row for row in table if row.order is not None), *table) if one_order else table
    return next(row for row in rows if row.refusal(case) is None)


def explain(table: Sequence[Row], case) -> dict[str, str | None]:
    """For each row of a table up to the one that serves a case, by its name: why it does not; None for the last one."""
    found: dict[str, str | None] = {}
    for row in table:
        found[row.name] = row.refusal(case)
        if found[row.name] is None:
            break
    return found
