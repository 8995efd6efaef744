"""The routes of the server, and the small endpoints: health, load, version and models."""

import dataclasses
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

import jspec
from jspec.serving.anthropic.endpoints import count_tokens, messages
from jspec.serving.generation.service import Service
from jspec.serving.http.errors import ApiError
from jspec.serving.openai.chat import chat
from jspec.serving.openai.completions import completions
from jspec.serving.openai.generate import generate
from jspec.serving.openai.tokenize import detokenize, tokenize, tokenizer_info
from jspec.serving.responses_api.endpoints import forget_response, responses, stored_response
from jspec.serving.server.metrics import EngineCollector
from jspec.serving.server.middleware import Middleware
from jspec.serving.server.page import page
from jspec.serving.server.rl_routes import RLRoutes

Handler = Callable[[Service, Request], Awaitable[Response]]


def make_app(service: Service, rl_routes: RLRoutes | None = None) -> ASGIApp:
    """The ASGI application that serves a model under OpenAI's paths, and with ``rl_routes`` under those of a trainer."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(service))

    async def metrics(_: Service, http: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    paths: dict[tuple[str, str], Handler] = {
        ("GET", "/"): page,
        ("GET", "/health"): _health,
        ("GET", "/ping"): _health,
        ("POST", "/ping"): _health,
        ("GET", "/load"): _load,
        ("GET", "/version"): _version,
        ("GET", "/metrics"): metrics,
        ("GET", "/v1/models"): _models,
        ("GET", "/v1/models/{model:path}"): _model,
        ("POST", "/v1/completions"): completions,
        ("POST", "/v1/chat/completions"): chat,
        ("POST", "/inference/v1/generate"): generate,
        ("POST", "/v1/responses"): responses,
        ("GET", "/v1/responses/{id}"): stored_response,
        ("DELETE", "/v1/responses/{id}"): forget_response,
        ("POST", "/v1/messages"): messages,
        ("POST", "/v1/messages/count_tokens"): count_tokens,
        ("POST", "/tokenize"): tokenize,
        ("POST", "/detokenize"): detokenize,
        ("GET", "/tokenizer_info"): tokenizer_info,
        **({} if rl_routes is None else rl_routes.handlers()),
    }
    bound = {place: functools.partial(handler, service) for place, handler in paths.items()}
    routes = [Route(path, handler, methods=[method]) for (method, path), handler in bound.items()]
    # A router without Starlette's middlewares, whose error responses are not OpenAI's.
    return Middleware(Router(routes, redirect_slashes=False), service)


async def _health(service: Service, _: Request) -> Response:
    """200 while requests are accepted and the engine works, else 503."""
    if service.draining or service.engine.closed:
        raise ApiError(503, "the server is shutting down")
    if service.engine.error is not None:
        raise ApiError(503, "the engine failed when it was last stepped; the server's log says why")
    return Response()


async def _load(service: Service, _: Request) -> Response:
    """How many requests are under way, without this one."""
    return JSONResponse({"server_load": service.in_flight - 1})


async def _version(_: Service, __: Request) -> Response:
    return JSONResponse({"version": jspec.__version__})


async def _models(service: Service, _: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_card(service, name) for name in service.names]})


async def _model(service: Service, http: Request) -> Response:
    return JSONResponse(_card(service, service.require_model(http.path_params["model"])))


def _card(service: Service, name: str) -> dict[str, Any]:
    """An entry of ``/v1/models``; the fields after ``max_model_len`` are jspec's own."""
    llm = service.llm
    speculation, engine = llm.speculation, llm.engine
    drafting = {
        "method": llm.method,
        "num_speculative_tokens": speculation.num_draft_tokens if llm.method else 0,
        "most_draft_tokens": engine.runner.num_draft_tokens,
        "draft_lengths": engine.runner.draft_lengths,
        "verify": speculation.verify,
        "draft_sampling": speculation.draft_sampling,
        "tree": "auto" if speculation.tree == "auto" else speculation.tree and dataclasses.asdict(speculation.tree),
    }
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "jspec",
        "root": service.names[0],
        "parent": None,
        "max_model_len": service.max_len,
        "speculation": drafting,
        "chat": service.chats,
        "reproducible": engine.config.reproducible,
    }
