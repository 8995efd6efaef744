"""The workers of all hosts of a Ray cluster: an actor on each host starts the worker there."""

import asyncio
import contextlib
import dataclasses
import math
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jspec._validation import require
from jspec.serving.supervisor.messages import Ended, Report, Task
from jspec.serving.supervisor.worker_process import WorkerProcess

PLACEMENT = 60.0  # seconds within which Ray has to find the hosts
MISTAKE = 2  # exit code of a worker that refuses its options or a checkpoint
LAST_WORDS = 2.0  # seconds in which other workers may still report why they end
BEATS = 4  # reports, empty ones included, that an actor gives in ``lost_after`` seconds
# Environment variables that the workers get from this process: those of JAX, XLA, NCCL, the hub's cache and jspec.
_CARRIED = ("JAX_", "XLA_", "NCCL_", "HF_", "JSPEC_")
_NOT_CARRIED = ("JSPEC_API_KEY", "JSPEC_HOST_IP")  # is among the worker's options; is the address of this host


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The number of hosts that run the target, and the GPUs of each."""

    count: int
    gpus: int


def hosts_of(nnodes: int | None, tensor_parallel: int, gpus: Sequence[float]) -> Hosts:
    """``--nnodes`` hosts, or as few as have the GPUs.

    Args:
      nnodes: the number of hosts; None computes it.
      tensor_parallel: GPUs of the target; devices where no host has GPUs.
      gpus: of each node of the cluster.

    Raises:
      ValueError: the cluster lacks such hosts.
    """
    most = int(max(gpus, default=0))
    if nnodes is None:
        require(most > 0, "nnodes", None, "a number of hosts, since no node of the Ray cluster has GPUs")
        nnodes = math.ceil(tensor_parallel / most)
    ok = tensor_parallel % nnodes == 0
    require(ok, "nnodes", nnodes, f"a divisor of tensor_parallel_size={tensor_parallel}, so that hosts share it evenly")
    each = tensor_parallel // nnodes if most else 0
    fitting = sum(count >= each for count in gpus)
    expected = f"at most {fitting}, the nodes of the Ray cluster that have {each} GPUs each"
    require(fitting >= nnodes, "nnodes", nnodes, expected)
    return Hosts(nnodes, each)


class Host:
    """The actor on one host, which starts the worker there.

    Args:
      lost_after: seconds within which the worker has to respond.
    """

    def __init__(self, lost_after: float):
        self._lost_after = lost_after
        self._worker: WorkerProcess | None = None

    async def address(self) -> tuple[str, int]:
        """The address of this host, and a free port."""
        import ray  # pyright: ignore[reportMissingImports]

        with socket.create_server(("", 0)) as free:
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    async def start(self, task: Task, environment: Mapping[str, str]):
        """Start the worker."""
        self._worker = await WorkerProcess.start(task, self._lost_after, environment)

    async def report(self) -> Report | Ended | None:
        """The next report of the worker; None if none came within ``lost_after / BEATS`` seconds."""
        assert self._worker is not None, "start comes first"
        try:
            return await asyncio.wait_for(self._worker.report(), self._lost_after / BEATS)
        except TimeoutError:
            return None

    async def end(self):
        """Ask the worker to shut down gracefully."""
        assert self._worker is not None, "start comes first"
        self._worker.end()


class RayGroup:
    """The workers of all hosts, with the interface of a single one.

    Args:
      actors: one for each host, the first of them that of process 0. Their workers have been started.
      free: returns their resources to Ray.
      lost_after: seconds after which a silent actor counts as lost.
    """

    def __init__(self, actors: Sequence[Any], free: Callable[[], None], lost_after: float):
        self._actors, self._free, self._lost_after = actors, free, lost_after
        self._reports: asyncio.Queue[Report | Ended] = asyncio.Queue()
        self._killed: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._watching = asyncio.ensure_future(self._watch())

    @classmethod
    async def start(cls, hosts: Hosts, options: dict[str, Any], group: dict[str, Any], token: str, lost_after: float):
        """Allocate the hosts, and start a worker on each of them.

        Args:
          hosts: their number and GPUs.
          options: of ``jspec serve``.
          group: arguments of ``jax.distributed.initialize`` that are the same on every host.
          token: the secret that the leader requires of requests.
          lost_after: seconds within which a worker and its actor have to respond.

        Raises:
          OSError: Ray did not provide the hosts, or has lost one of them already.
        """
        import ray  # pyright: ignore[reportMissingImports]

        placement, actors = _placement(hosts), []

        def free():
            with contextlib.suppress(ray.exceptions.RayError):  # Ray itself is lost
                for actor in actors:
                    ray.kill(actor)
                ray.util.remove_placement_group(placement)

        try:
            await _soon(placement.ready(), PLACEMENT)
            actors += [_actor(placement, index, hosts.gpus, lost_after) for index in range(hosts.count)]
            address, port = await _soon(actors[0].address.remote(), PLACEMENT)
            environment = {name: value for name, value in os.environ.items() if name.startswith(_CARRIED)}
            environment = {name: value for name, value in environment.items() if name not in _NOT_CARRIED}
            starting = []
            for rank, actor in enumerate(actors):
                place = {"coordinator_address": f"{address}:{port}", "num_processes": hosts.count, "process_id": rank}
                place["cluster_detection_method"] = "deactivate"  # Ray has provided the addresses
                task = Task(options, {**group, **place}, address, token)
                leader = {"JSPEC_HOST_IP": address} if rank == 0 else {}
                starting.append(_soon(actor.start.remote(task, {**environment, **leader}), PLACEMENT))
            await asyncio.gather(*starting)
        except (TimeoutError, ray.exceptions.RayError) as error:
            free()
            wanted = f"{hosts.count} hosts with {hosts.gpus} GPUs each"
            why = f"not within {PLACEMENT:.0f} seconds" if isinstance(error, TimeoutError) else str(error)
            raise OSError(f"Ray did not give {wanted}: {why}") from error
        return cls(actors, free, lost_after)

    async def report(self) -> Report | Ended:
        return await self._reports.get()

    def end(self):
        self._actors[0].end.remote()

    def kill(self, why: str):
        if not self._killed.done():
            self._killed.set_result(Ended(137, why))

    async def _watch(self):
        """Queue the workers' reports. The group has ended when one of them was lost, or all have ended in order."""
        following = [asyncio.ensure_future(self._follow(rank)) for rank in range(len(self._actors))]
        done, waiting = set(), {self._killed, *following}
        while len(waiting) > 1 and all(task.result().code == 0 for task in done):
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not self._killed.done():
            await asyncio.wait(following, timeout=LAST_WORDS)
        ends = [task.result() for task in (self._killed, *following) if task.done()]
        for task in following:
            task.cancel()
        self._free()
        # The reason of a worker that refused to start says more than that of the others, which miss it.
        self._reports.put_nowait(max(ends, key=lambda ended: (ended.code == MISTAKE, ended.code != 0)))

    async def _follow(self, rank: int) -> Ended:
        """Receive a host's reports until its worker has ended."""
        import ray  # pyright: ignore[reportMissingImports]

        while True:
            try:
                report = await _soon(self._actors[rank].report.remote(), self._lost_after)
            except TimeoutError:
                return Ended(1, f"host {rank} did not answer within {self._lost_after:.0f} seconds")
            except ray.exceptions.RayError as error:
                return Ended(1, f"host {rank} was lost: {str(error).splitlines()[0]}")
            if isinstance(report, Ended):
                return dataclasses.replace(report, why=f"{report.why} (host {rank})") if report.code > 2 else report
            if rank == 0 and report is not None:
                self._reports.put_nowait(report)


def nodes_of_cluster() -> list[float]:
    """The GPUs of each node of the Ray cluster that this process belongs to, or that it starts.

    Raises:
      ValueError: Ray is not installed.
      OSError: the cluster cannot be reached.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise ValueError("distributed='ray': expected what pip install 'jspec[ray]' installs") from None
    try:
        ray.init()
    except ConnectionError as error:
        raise OSError(f"the Ray cluster cannot be reached ({error}): start it, or set RAY_ADDRESS") from None
    return [node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]]


def _placement(hosts: Hosts) -> Any:
    """A placement group with one bundle on each of ``hosts.count`` different nodes."""
    import ray  # pyright: ignore[reportMissingImports]

    bundle = {"CPU": 1.0, **({"GPU": float(hosts.gpus)} if hosts.gpus else {})}
    return ray.util.placement_group([bundle] * hosts.count, strategy="STRICT_SPREAD")


def _actor(placement: Any, index: int, gpus: int, lost_after: float) -> Any:
    import ray  # pyright: ignore[reportMissingImports]
    from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
        PlacementGroupSchedulingStrategy,
    )

    strategy = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=index)
    options = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0, "scheduling_strategy": strategy}
    return ray.remote(Host).options(**options).remote(lost_after)


async def _soon(reference: Any, seconds: float) -> Any:
    """The value of a Ray reference.

    Raises:
      TimeoutError: it takes longer than ``seconds``.
    """
    return await asyncio.wait_for(asyncio.wrap_future(reference.future()), seconds)
