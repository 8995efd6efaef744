"""``jspec serve`` with several hosts: supervises this host's worker, or with Ray the workers of all hosts."""

import argparse
import asyncio
import functools
from typing import Any

from jspec.commands.group_args import RAY, group_of
from jspec.serving.http.settings import ServerSettings, keys_of, log_to_stderr
from jspec.serving.supervisor.messages import Task
from jspec.serving.supervisor.public import Public
from jspec.serving.supervisor.supervisor import Supervisor
from jspec.serving.supervisor.worker_process import WorkerHandle, WorkerProcess

LOOPBACK = "127.0.0.1"


def supervise(args: argparse.Namespace, settings: ServerSettings) -> int:
    """Supervise this host's worker until the group ends; returns the exit code.

    Raises:
      ValueError: an option cannot be used, Ray is not installed, or its cluster has no such hosts.
      OSError: the cluster cannot be reached.
    """
    log_to_stderr(settings)
    return asyncio.run(_supervise(args, settings))


async def _supervise(args: argparse.Namespace, settings: ServerSettings) -> int:
    group, options = group_of(args), options_of(args)
    assert group is not None
    rank = group.get("process_id")
    leads = None if rank is None else rank == 0
    if args.distributed == RAY:  # then this process starts the workers of all hosts
        from jspec.serving.supervisor.ray_group import RayGroup, hosts_of, nodes_of_cluster

        leads, hosts = True, hosts_of(args.nnodes, args.tensor_parallel_size or 1, nodes_of_cluster())

        async def start(token: str) -> WorkerHandle:
            return await RayGroup.start(hosts, options, group, token, args.lost_after)
    else:

        async def start(token: str) -> WorkerHandle:
            return await WorkerProcess.start(Task(options, group, LOOPBACK, token), args.lost_after)

    make_public = functools.partial(Public, settings, args.served_model_name or [args.target])
    drain = settings.shutdown_timeout
    return await Supervisor(start, make_public, leads, shutdown_timeout=drain, lost_after=args.lost_after).run()


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a worker: those of its supervisor, with the API keys of the supervisor's environment."""
    options = {name: value for name, value in vars(args).items() if name != "command"}
    return {**options, "api_key": keys_of(args)}
