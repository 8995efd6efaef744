"""``jspec serve``: its options, and the choice between a single process and a supervisor."""

import argparse
import dataclasses

from jspec._validation import require_packages
from jspec.commands.group_args import RAY, add_group_options, group_of
from jspec.commands.model_args import add_model_options, add_speculation_options, local_models
from jspec.config.engine import LOGPROBS_MODES
from jspec.serving.http.limits import Limits

PACKAGES = ("starlette", "uvicorn", "pydantic", "prometheus_client")  # of the extra ``serve``
SUPERVISOR_PACKAGES = ("aiohttp",)  # also of it; needed where several processes run the target


def add_arguments(parser: argparse.ArgumentParser):
    """Declare the arguments. Names are vLLM's where they mean the same."""
    add_model_options(parser)
    _add_requests(parser)
    add_speculation_options(parser)
    add_group_options(parser, ray=True)
    _add_server(parser)
    limits = parser.add_argument_group("limits of a request")
    for field in dataclasses.fields(Limits):
        option, kind = f"--{field.name.replace('_', '-')}", float if isinstance(field.default, float) else int
        help = f"{field.metadata['help']}; %(default)s"
        limits.add_argument(option, type=kind, default=field.default, help=help)


def _add_requests(parser: argparse.ArgumentParser):
    parser.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names of the model for clients; the target"
    )
    parser.add_argument("--max-waiting", type=int, default=1024, help="requests that may wait; %(default)s")
    modes = "log-probabilities of the target itself, or of the distribution that tokens are drawn from; the first"
    parser.add_argument("--logprobs-mode", choices=LOGPROBS_MODES, help=modes)
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja template in place of the checkpoint's")
    parser.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        default="auto",
        help="format of the model's tool calls; auto goes by the chat template, none leaves calls in the text; %(default)s",
    )
    parser.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        default="auto",
        help="format of the model's reasoning; auto goes by the chat template, none leaves it in the text; %(default)s",
    )
    parser.add_argument(
        "--enable-auto-tool-choice", action="store_true", help="vLLM's option for what jspec does unless told otherwise"
    )
    parser.add_argument(
        "--default-chat-template-kwargs",
        metavar="JSON",
        help="variables of the template where a request sets none",
    )
    parser.add_argument(
        "--template-kwargs", nargs="*", metavar="NAME", help="variables of the template that requests may set"
    )


def _add_server(parser: argparse.ArgumentParser):
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="0.0.0.0 serves other machines, too; %(default)s")
    group.add_argument("--port", type=int, default=8000, help="0 takes any that is free; %(default)s")
    group.add_argument(
        "--api-key", nargs="+", metavar="KEY", help="clients need one of these; or the variable JSPEC_API_KEY"
    )
    group.add_argument(
        "--allowed-hosts",
        nargs="+",
        metavar="NAME",
        help="hosts that requests may be for; those of this machine if only it can connect, else any, which is '*'",
    )
    group.add_argument("--scheduling-policy", choices=("fcfs", "priority"), default="fcfs")
    group.add_argument(
        "--shutdown-timeout", type=float, default=30.0, help="seconds for requests to end at SIGTERM; %(default)s"
    )
    group.add_argument(
        "--rl-routes",
        action="store_true",
        help="vLLM's routes for a trainer: /pause, /sleep, /update_weights and others; needs an API key",
    )
    group.add_argument(
        "--weights-root", metavar="DIR", help="the folder below which /update_weights may read checkpoints"
    )
    group.add_argument("--ssl-certfile", metavar="FILE")
    group.add_argument("--ssl-keyfile", metavar="FILE")
    group.add_argument("--log-level", choices=("critical", "error", "warning", "info", "debug"), default="info")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends the process; returns the exit code.

    Where several processes run the target, this one is a supervisor (``jspec.serving.supervisor``), and needs no JAX.

    Raises:
      ValueError: an option cannot be used, or a package of the extra is not installed.
    """
    several = group_of(args) is not None
    require_packages("serve", *PACKAGES, *(SUPERVISOR_PACKAGES if several else ()))
    from jspec.serving.http.settings import log_to_stderr, settings_of

    settings = settings_of(args)
    if several:
        from jspec.serving.supervisor.command import supervise

        if args.rl_routes:
            raise ValueError("rl_routes=True: expected False where several processes run the target")
        if args.distributed != RAY:
            local_models(args)  # here somebody may answer a question; this host's worker then finds them in the cache
        return supervise(args, settings)
    from jspec.serving.http.server import listener
    from jspec.serving.server.lifecycle import run as serve
    from jspec.serving.server.rl_routes import rl_routes_of
    from jspec.serving.server.served_model import load_service

    load, rl_routes = load_service(args, settings), rl_routes_of(args, settings)
    log_to_stderr(settings)
    with listener(settings.host, settings.port) as bound:
        serve(load(), bound, settings, rl_routes)
    return 0
