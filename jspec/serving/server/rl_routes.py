"""vLLM's routes for reinforcement learning: a trainer in another process pauses a server, and gives it new weights.

``jspec serve --rl-routes`` has them, and no other server: whoever may call them decides what the model says. So they need an
API key, and new weights come from folders below ``--weights-root`` alone."""

import argparse
import asyncio
import dataclasses
import functools
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jspec._validation import require
from jspec.serving.generation.json_body import read_object
from jspec.serving.generation.service import Service
from jspec.serving.http.auth import ENVIRONMENT
from jspec.serving.http.errors import ApiError, require_that, wrong
from jspec.serving.http.settings import ServerSettings

Handler = Callable[[Service, Request], Awaitable[Response]]


def rl_routes_of(args: argparse.Namespace, settings: ServerSettings) -> "RLRoutes | None":
    """The routes that parsed options ask for; None if they ask for none.

    Raises:
      ValueError: an option cannot be used.
    """
    root = args.weights_root
    require(root is None or args.rl_routes, "weights_root", root, "None without --rl-routes")
    if not args.rl_routes:
        return None
    require(settings.keys.needed, "rl_routes", True, f"an API key beside it, by --api-key or {ENVIRONMENT}")
    require(root is None or os.path.isdir(root), "weights_root", root, "a folder")
    return RLRoutes(None if root is None else Path(root).resolve())


@dataclasses.dataclass(frozen=True)
class RLRoutes:
    """What the routes may do.

    Attributes:
      weights_root: the folder below which checkpoints are that may be loaded; None for none.
    """

    weights_root: Path | None = None

    def handlers(self) -> dict[tuple[str, str], Handler]:
        """(method, path) -> handler."""
        return {
            ("POST", "/pause"): _pause,
            ("POST", "/resume"): _resume,
            ("GET", "/is_paused"): _is_paused,
            ("POST", "/sleep"): _sleep,
            ("POST", "/wake_up"): _wake_up,
            ("GET", "/is_sleeping"): _is_sleeping,
            ("POST", "/reset_prefix_cache"): _reset_prefix_cache,
            ("POST", "/update_weights"): functools.partial(_update_weights, self.weights_root),
            ("POST", "/update_weight_version"): _update_weight_version,
            ("GET", "/weight_info"): _weight_info,
            ("GET", "/get_world_size"): _get_world_size,
        }


async def _pause(service: Service, http: Request) -> Response:
    """``?mode=abort`` (the default, as in vLLM), ``wait`` or ``keep``: what becomes of requests under way. Unless
    ``?clear_cache=false``, cached pages are forgotten, too."""
    mode, clears = http.query_params.get("mode", "abort"), _flag(http, "clear_cache", True)
    require_that(mode in ("abort", "wait", "keep"), "mode", mode, "abort, wait or keep")

    def pause():
        service.llm.pause(mode)
        if clears:
            service.llm.reset_prefix_cache()

    await _called(pause)
    return JSONResponse({"status": "paused"})


async def _resume(service: Service, _: Request) -> Response:
    await _called(service.llm.resume)
    return JSONResponse({"status": "resumed"})


async def _is_paused(service: Service, _: Request) -> Response:
    return JSONResponse({"is_paused": service.llm.is_paused})


async def _sleep(service: Service, http: Request) -> Response:
    """``?level=1`` or ``2``."""
    level = http.query_params.get("level", "1")
    require_that(level in ("1", "2"), "level", level, "1 or 2")
    await _called(lambda: service.llm.sleep(int(level)))
    return Response()


async def _wake_up(service: Service, _: Request) -> Response:
    await _called(service.llm.wake_up)
    return Response()


async def _is_sleeping(service: Service, _: Request) -> Response:
    return JSONResponse({"is_sleeping": service.llm.is_sleeping})


async def _reset_prefix_cache(service: Service, _: Request) -> Response:
    await _called(service.llm.reset_prefix_cache)
    return Response()


async def _update_weights(root: Path | None, service: Service, http: Request) -> Response:
    """``{"path": a folder or GGUF file below --weights-root, "weight_version": an int or text, "recompute": a boolean}``."""
    body = await read_object(service, http)
    unknown = sorted(body.keys() - {"path", "weight_version", "recompute"})
    if unknown:
        raise ApiError(400, f"{unknown[0]} is unknown: expected path, weight_version and recompute", unknown[0])
    folder, version = _folder_below(root, body.get("path")), _version_in(body, required=False)
    llm, recompute = service.llm, body.get("recompute", False)
    require_that(isinstance(recompute, bool), "recompute", recompute, "true or false")
    options = {"version": version, "recompute": recompute}
    done = await _called(lambda: llm.update_weights_from(folder, wait=not llm.is_paused, **options))
    return JSONResponse({"weight_version": done.version, "seconds": done.seconds, "bytes": done.num_bytes})


async def _update_weight_version(service: Service, http: Request) -> Response:
    """``{"weight_version": an int or text}``: what results say from now on."""
    version = _version_in(await read_object(service, http), required=True)
    assert version is not None
    await _called(lambda: service.llm.engine.between_requests(functools.partial(_name_version, service, version)))
    return JSONResponse({"weight_version": version})


async def _weight_info(service: Service, _: Request) -> Response:
    loop = service.llm.engine.loop
    return JSONResponse({"weight_version": loop.weights_version, "complete": loop.incomplete is None})


async def _get_world_size(service: Service, _: Request) -> Response:
    """How many devices the target has."""
    target: Any = service.llm.target
    shards = getattr(target, "shards", None)
    return JSONResponse({"world_size": 1 if shards is None else shards.count})


def _name_version(service: Service, version: int | str):
    loop = service.llm.engine.loop
    loop.forget_weights()  # which reads the last tokens of the version before
    loop.weights_version = version


def _version_in(body: dict[str, Any], required: bool) -> int | str | None:
    version = body.get("weight_version")
    known = isinstance(version, int | str) and not isinstance(version, bool)
    require_that(known or (version is None and not required), "weight_version", version, "an integer or text")
    return version


def _folder_below(root: Path | None, given: Any) -> Path:
    """The folder of a path below the root, or the GGUF file; links and ``..`` are no part of it.

    Raises:
      ApiError: 400; there is no root, or no such folder below it.
    """
    if root is None:
        raise ApiError(400, "the server reads no weights: start it with --weights-root DIR", "path")
    require_that(isinstance(given, str) and bool(given) and "\0" not in given, "path", given, "text")
    path = Path(given)
    if path.is_absolute() and path.is_relative_to(root):
        path = path.relative_to(root)
    folder = root / path
    try:
        plain = ".." not in path.parts and not path.is_absolute() and folder.resolve() == folder
        plain = plain and (folder.is_dir() or (folder.suffix.lower() == ".gguf" and folder.is_file()))
    except OSError:  # a name that is too long, or links in a ring
        plain = False
    if not plain:
        raise wrong("path", given, "a folder below --weights-root, or a GGUF file, without links and ..")
    return folder


def _flag(http: Request, name: str, default: bool) -> bool:
    given = http.query_params.get(name, str(default)).lower()
    require_that(given in ("true", "false"), name, given, "true or false")
    return given == "true"


async def _called(function: Callable[[], Any]) -> Any:
    """The result of a function that waits for the engine, in a thread of its own.

    Raises:
      ApiError: 400 for what it does not take, or 409 for what cannot be now.
    """
    try:
        return await asyncio.to_thread(function)
    except ValueError as error:
        raise ApiError(400, str(error)) from None
    except RuntimeError as error:
        raise ApiError(409, str(error)) from None
