"""What the GPU did, by CUPTI's trace: which kernels take the time of a program, and for how long it was busy."""

import collections
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax

FLAGS = "XLA_FLAGS"
KEEP_GRAPHS = "--xla_enable_command_buffers_during_profiling=true"


def keep_graphs():
    """Have XLA run CUDA graphs as graphs also while the profiler records, and not kernel by kernel as it does by default.

    To be called before JAX compiles anything in this process: XLA reads its flags once. What ``XLA_FLAGS`` says
    otherwise stays as it is; of a flag that is there twice, XLA takes the last.

    Raises:
      ValueError: ``XLA_FLAGS`` names a file of flags, to which nothing can be added.
    """
    flags = os.environ.get(FLAGS, "").strip()
    if flags and not flags.startswith("-"):
        raise ValueError(f"{FLAGS}={flags}: expected flags and not a file of them, because {KEEP_GRAPHS} is added")
    os.environ[FLAGS] = f"{flags} {KEEP_GRAPHS}".lstrip()


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


class Busy(NamedTuple):
    """How much of a stretch of time the GPU worked.

    Attributes:
      span: seconds from the beginning of the first event of its streams to the end of the last.
      busy: seconds of them in which any stream had an event: the length of the union of their intervals.
      events: how many there were.
    """

    span: float
    busy: float
    events: int


def busy_time(call: Callable[[], object]) -> Busy | None:
    """How busy the GPU was while the host made a call; None where there is no GPU.

    Events are kernels, copies and CUDA graphs. A graph is busy from its beginning to its end, the pauses of a microsecond
    between its kernels included. Without ``keep_graphs`` there are no graphs in the trace: the host then launches every
    kernel by itself, and the GPU waits for it as it otherwise would not. Lines that the profiler derives from the
    streams, such as those of modules and steps, do not count: they cover the gaps between kernels. The host is not
    traced, which would slow it down.
    """
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    options.advanced_configuration = {"gpu_enable_cupti_activity_graph_trace": True}  # a graph is one event
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            call()
        finally:
            jax.profiler.stop_trace()
        intervals = [(event.start_ns, event.start_ns + event.duration_ns) for event in stream_events(folder)]
    if not intervals:
        return None
    span = max(end for _, end in intervals) - min(start for start, _ in intervals)
    return Busy(1e-9 * span, 1e-9 * union_length(intervals), len(intervals))


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """How long at least one of the intervals (start, end) lasts."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total


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
    total = sum(one.seconds for one in times)
    lines = [f"{1e6 * total / rounds:9.1f} us in {sum(one.launches for one in times) / rounds:.1f} kernels a round"]
    for one in times[:most]:
        each = 1e6 * one.seconds / one.launches
        lines.append(f"{1e6 * one.seconds / rounds:9.1f} us {one.launches / rounds:7.1f} x {each:7.2f} us  {one.name}")
    return "\n".join(lines)
