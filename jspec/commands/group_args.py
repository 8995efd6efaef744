"""Options of a group of processes that run one target, on one host or on several, of ``jspec serve`` and ``jspec bench``."""

import argparse
from typing import Any

from jspec._validation import require

ENVIRONMENT, RAY = "environment", "ray"  # where the addresses of the group's processes come from
_HOSTS = ("nnodes", "node_rank", "master_addr")  # options that need each other
_LEAST_LOST_AFTER = 5  # seconds; a healthy process may be silent for as long
# JAX's heartbeat timeout as a share of --lost-after, because JAX checks heartbeats in intervals.
_HEARTBEAT = 0.8


def add_group_options(parser: argparse.ArgumentParser, ray: bool = False):
    """Declare the options of a group of processes that run one target, on one host or on several.

    Args:
      parser: of a command.
      ray: whether the command can have Ray start them.
    """
    group = parser.add_argument_group("several hosts", "the same command runs on each; the first host answers clients")
    group.add_argument(
        "--distributed",
        nargs="?",
        const=ENVIRONMENT,
        choices=(ENVIRONMENT, RAY) if ray else (ENVIRONMENT,),
        help=f"{ENVIRONMENT} (the default): SLURM, Open MPI or Kubernetes name the processes of the group"
        + (f"; {RAY}: this command alone starts a process on each host of a cluster" if ray else ""),
    )
    group.add_argument("--nnodes", type=int, metavar="N", help="number of hosts")
    group.add_argument("--node-rank", type=int, metavar="I", help="which of them this is, from 0")
    group.add_argument("--master-addr", metavar="HOST", help="the first host, as the others reach it")
    group.add_argument("--master-port", type=int, default=29501, metavar="PORT", help="a free port there; %(default)s")
    group.add_argument(
        "--lost-after",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="a host that has been silent for so long is lost; %(default)s",
    )


def group_of(args: argparse.Namespace) -> dict[str, Any] | None:
    """The arguments of ``jax.distributed.initialize`` for the group of processes; None for a single process.

    With Ray, the addresses are missing, because only Ray knows them.

    Raises:
      ValueError: an option is missing, or cannot be used.
    """
    given = {name: getattr(args, name) for name in _HOSTS if getattr(args, name) is not None}
    count, rank, lost_after = args.nnodes, args.node_rank, args.lost_after
    ok = _LEAST_LOST_AFTER <= lost_after < 1e6
    require(ok, "lost_after", lost_after, f"a number of seconds, at least {_LEAST_LOST_AFTER}")
    seconds = {
        "heartbeat_timeout_seconds": int(_HEARTBEAT * lost_after),
        "shutdown_timeout_seconds": int(lost_after),  # that processes wait for each other at an orderly shutdown
    }
    if args.distributed is not None:
        allowed = ("nnodes",) if args.distributed == RAY else ()
        beside = [f"--{name.replace('_', '-')}" for name in given if name not in allowed]
        require(not beside, "distributed", args.distributed, f"it alone, without {' and '.join(beside)}")
        require(count is None or count >= 1, "nnodes", count, "a number of hosts, at least 1")
        return seconds
    if not given:
        return None
    for name in _HOSTS:
        require(name in given, name, None, f"a value beside --{next(iter(given)).replace('_', '-')}")
    require(count >= 1, "nnodes", count, "a number of hosts, at least 1")
    require(0 <= rank < count, "node_rank", rank, f"an integer in 0..{count - 1}")
    require(0 < args.master_port < 2**16, "master_port", args.master_port, "an integer in 1..65535")
    if count == 1:
        return None
    address = f"{args.master_addr}:{args.master_port}"
    # Else JAX detects SLURM or MPI and takes only one of this process's GPUs, as if it were one of several tasks.
    everything = {"cluster_detection_method": "deactivate"}
    return {"coordinator_address": address, "num_processes": count, "process_id": rank, **everything, **seconds}
