"""One launch that goes through several phases: its programs meet between them, and touch what they read next.

Every program must be running at once, so a launch has at most one program per multiprocessor.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

_H200_CORES = 132
_LINE = 64  # bytes that the memory hands out at a time


def num_cores() -> int:
    """Multiprocessors of the smallest GPU here; where there is none, as in a test that only compiles, of an H200."""
    if jax.default_backend() != "gpu":
        return _H200_CORES
    return min(device.core_count for device in jax.local_devices())


def meet(count_ref, programs: int, meanwhile: Callable):
    """Wait until all ``programs`` have come here; what any of them stored before, all of them see afterwards.

    Args:
      count_ref: int32 ``[1]``, arrivals so far; a multiple of ``programs`` when a launch begins.
      programs: of the launch.
      meanwhile: what to do between arriving and waiting.

    Returns:
      what ``meanwhile`` returned.
    """
    first = (jnp.int32(0),)
    pltriton.debug_barrier()  # one thread arrives for all: the stores of the others come before it
    ticket = pltriton.atomic_add(count_ref, first, jnp.int32(1))
    done = meanwhile()
    everyone = (jax.lax.div(ticket, jnp.int32(programs)) + 1) * programs
    jax.lax.while_loop(
        lambda arrived: arrived < everyone,
        lambda _: pltriton.atomic_add(count_ref, first, jnp.int32(0)),  # a load would be taken for idle, and left out
        ticket + 1,
    )
    pltriton.debug_barrier()
    return done


def touch(ref, rows, real, size: int, sink_ref) -> Callable[[], None]:
    """Have the first ``size`` bytes, all told, of some rows of a matrix fetched into the second-level cache.

    Args:
      ref: ``[outputs, width]``.
      rows: int32 ``[n]``, and
      real: bool ``[n]``, those that exist.
      size: bytes; each row gets an equal part, in whole lines.
      sink_ref: float32 ``[programs]``, for what was read: a load that nothing uses would be left out.

    Returns:
      what waits for them to arrive.
    """
    n, step = rows.shape[0], _LINE // ref.dtype.itemsize
    lines = 1 << max(min(size // (n * _LINE), ref.shape[1] // step), 1).bit_length() - 1
    column = jnp.arange(lines, dtype=jnp.int32) * step
    shape = n, lines
    at = jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(column[None], shape)
    seen = pltriton.load(ref.at[at], mask=jnp.broadcast_to(real[:, None], shape), other=0)

    def finish():
        sink_ref[pl.program_id(0)] = jnp.max(jnp.max(seen.astype(jnp.float32), axis=1))

    return finish
