"""``jspec serve``: its options, and what they mean for ``jspec.load`` and for the server."""

import argparse
import dataclasses
import importlib.util
import os
import sys

from jspec._arguments import require
from jspec.model_options import add_group_options, add_model_options, add_speculation_options, chosen_model
from jspec.serving.openai.limits import LIMIT_HELP, Limits

PACKAGES = ("starlette", "uvicorn", "pydantic", "prometheus_client")  # of the extra ``serve``


def add_arguments(parser: argparse.ArgumentParser):
    """Declare the arguments. Names are vLLM's where they mean the same."""
    add_model_options(parser)
    _add_requests(parser)
    add_speculation_options(parser)
    add_group_options(parser)
    _add_server(parser)
    limits = parser.add_argument_group("limits of a request")
    for field in dataclasses.fields(Limits):
        option, kind = f"--{field.name.replace('_', '-')}", float if isinstance(field.default, float) else int
        limits.add_argument(
            option, type=kind, default=field.default, help=f"{LIMIT_HELP.get(field.name, '')}; %(default)s"
        )


def _add_requests(parser: argparse.ArgumentParser):
    parser.add_argument("--served-model-name", nargs="+", metavar="NAME", help="what clients may call it; the target")
    parser.add_argument("--max-waiting", type=int, default=1024, help="requests that may wait; %(default)s")
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja template in place of the checkpoint's")
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
    group.add_argument("--scheduling-policy", choices=("fcfs", "priority"), default="fcfs")
    group.add_argument(
        "--shutdown-timeout", type=float, default=30.0, help="seconds for answers to end at SIGTERM; %(default)s"
    )
    group.add_argument("--ssl-certfile", metavar="FILE")
    group.add_argument("--ssl-keyfile", metavar="FILE")
    group.add_argument("--log-level", choices=("critical", "error", "warning", "info", "debug"), default="info")


def run(args: argparse.Namespace) -> int:
    """Serve until the process is told to end; returns the exit code.

    Raises:
      ValueError: an option cannot be used.
    """
    require_packages()
    import logging

    import jspec
    from jspec.chat import read_template
    from jspec.serving.openai.keys import ENVIRONMENT, Keys
    from jspec.serving.openai.process import listener
    from jspec.serving.openai.process import run as serve
    from jspec.serving.openai.service import TEMPLATE_KWARGS, Service

    model = chosen_model(args)
    from_environment = [os.environ[ENVIRONMENT]] if os.environ.get(ENVIRONMENT) else []
    keys = Keys(args.api_key or from_environment)
    limits = Limits(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Limits)})
    template = None if args.chat_template is None else read_template(args.chat_template)
    certificate = _certificate(args)
    seconds = args.shutdown_timeout
    require(0 <= seconds < 1e6, "shutdown_timeout", seconds, "a number of seconds, at least 0")
    require(0 <= args.port < 2**16, "port", args.port, "an integer in 0..65535")
    logging.basicConfig(format="%(levelname)s: %(name)s: %(message)s")
    logging.getLogger("jspec").setLevel(args.log_level.upper())
    if model.followed():
        return 0
    with listener(args.host, args.port) as bound:
        llm = model.load()
        if llm.tokenizer is None:
            print("jspec serve: the target has no tokenizer, so prompts are token ids alone", file=sys.stderr)
        print("jspec serve: compiling", file=sys.stderr, flush=True)
        llm.warmup()
        service = Service(
            engine=jspec.AsyncEngine(llm),
            names=args.served_model_name or [args.target],
            keys=keys,
            limits=limits,
            chat_template=template,
            template_kwargs=TEMPLATE_KWARGS if args.template_kwargs is None else args.template_kwargs,
            priorities=args.scheduling_policy == "priority",
        )
        serve(service, bound, shutdown_timeout=seconds, log_level=args.log_level, certificate=certificate)
    return 0


def require_packages():
    """Refuse to go on without the packages of the extra.

    Raises:
      ValueError: one of them is not installed.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} not installed: expected what pip install 'jspec[serve]' installs")


def _certificate(args: argparse.Namespace) -> tuple[str, str] | None:
    chain, key = args.ssl_certfile, args.ssl_keyfile
    require(
        (chain is None) == (key is None), "ssl_certfile", chain, "both --ssl-certfile and --ssl-keyfile, or neither"
    )
    for name, file in (("ssl_certfile", chain), ("ssl_keyfile", key)):
        require(file is None or os.path.isfile(file), name, file, "a file")
    return None if chain is None else (chain, key)
