"""Which kernels take the time of a program, by CUPTI's trace of the GPU."""

import collections
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax


class KernelTime(NamedTuple):
    """One kernel: how often it was launched, and the seconds of all its launches together."""

    name: str
    launches: int
    seconds: float


def kernel_times(call: Callable) -> list[KernelTime]:
    """The kernels that a call launches, that with most seconds first; empty where there is no GPU.

    Kernels inside a CUDA graph are one event to CUPTI, so ``XLA_FLAGS=--xla_gpu_enable_command_buffer=`` has to be set.
    """
    seconds: collections.Counter[str] = collections.Counter()
    launches: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        for event in stream_events(folder):
            seconds[event.name] += 1e-9 * event.duration_ns
            launches[event.name] += 1
    return [KernelTime(name, launches[name], total) for name, total in seconds.most_common()]


def stream_events(folder: str) -> Iterator:
    """The events on the streams of all GPUs in the traces of a folder."""
    for trace in pathlib.Path(folder).rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
            if plane.name.startswith("/device:GPU"):
                for line in plane.lines:
                    if line.name.startswith("Stream"):
                        yield from line.events


def report(times: list[KernelTime], rounds: int, most: int = 30) -> str:
    """A line for each of the ``most`` kernels with most seconds: the time that they take in one round."""
    total = sum(kernel.seconds for kernel in times)
    lines = [
        f"{1e6 * total / rounds:9.1f} us in {sum(kernel.launches for kernel in times) / rounds:.1f} kernels a round"
    ]
    for kernel in times[:most]:
        each = 1e6 * kernel.seconds / kernel.launches
        lines.append(
            f"{1e6 * kernel.seconds / rounds:9.1f} us {kernel.launches / rounds:7.1f} x {each:7.2f} us  {kernel.name}"
        )
    return "\n".join(lines)
