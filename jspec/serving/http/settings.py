"""Settings of the server itself, without those of the model, from the options of ``jspec serve``."""

import argparse
import dataclasses
import logging
import os
from collections.abc import Sequence

from jspec._validation import require
from jspec.serving.http.auth import ENVIRONMENT, Keys
from jspec.serving.http.limits import Limits
from jspec.serving.http.standard_streams import keep_serving_without_them


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Address, API keys, limits and shutdown of a server.

    Attributes:
      host, port: the address at which it listens.
      keys: the API keys of clients.
      allowed_hosts: names for which the server answers; None is those of this machine if only it can connect, else any.
      limits: of a request.
      certificate: the files of a certificate and of its key, for HTTPS; None for HTTP.
      shutdown_timeout: seconds that requests under way have to end.
      log_level: of uvicorn and jspec.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keys: Keys = dataclasses.field(default_factory=Keys)
    allowed_hosts: Sequence[str] | None = None
    limits: Limits = dataclasses.field(default_factory=Limits)
    certificate: tuple[str, str] | None = None
    shutdown_timeout: float = 30.0
    log_level: str = "info"


def settings_of(args: argparse.Namespace) -> ServerSettings:
    """The settings of parsed options.

    Raises:
      ValueError: an option cannot be used.
    """
    seconds = args.shutdown_timeout
    require(0 <= seconds < 1e6, "shutdown_timeout", seconds, "a number of seconds, at least 0")
    require(0 <= args.port < 2**16, "port", args.port, "an integer in 0..65535")
    return ServerSettings(
        host=args.host,
        port=args.port,
        keys=Keys(keys_of(args)),
        allowed_hosts=args.allowed_hosts,
        limits=Limits(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Limits)}),
        certificate=_certificate(args),
        shutdown_timeout=seconds,
        log_level=args.log_level,
    )


def keys_of(args: argparse.Namespace) -> list[str]:
    """The API keys of the options, else of the environment."""
    from_environment = [os.environ[ENVIRONMENT]] if os.environ.get(ENVIRONMENT) else []
    return args.api_key or from_environment


def log_to_stderr(settings: ServerSettings):
    """Print jspec's log to standard error, as far as that can be written to."""
    keep_serving_without_them()
    logging.basicConfig(format="%(asctime)s %(levelname)s: %(name)s: %(message)s")
    logging.getLogger("jspec").setLevel(settings.log_level.upper())


def _certificate(args: argparse.Namespace) -> tuple[str, str] | None:
    chain, key = args.ssl_certfile, args.ssl_keyfile
    require(
        (chain is None) == (key is None), "ssl_certfile", chain, "both --ssl-certfile and --ssl-keyfile, or neither"
    )
    for name, file in (("ssl_certfile", chain), ("ssl_keyfile", key)):
        require(file is None or os.path.isfile(file), name, file, "a file")
    return None if chain is None else (chain, key)
