"""ASGI middleware: authentication, draining, and error mapping."""

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jspec.engine.pausing import NotServing
from jspec.serving.generation.service import Service, unavailable
from jspec.serving.http.auth import OPEN, WHILE_DRAINING
from jspec.serving.http.errors import ApiError, as_api_error, shown


class Middleware:
    """Checks the API key of each request, refuses requests during shutdown, and turns exceptions into OpenAI's errors.

    Args:
      app: handles the requests.
      service: the model and its settings.
    """

    def __init__(self, app: ASGIApp, service: Service):
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send):
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False
        scope["app"] = self  # so that Starlette raises its errors instead of sending them in its own format

        async def sending(message: Message):
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        self._service.in_flight += 1
        try:
            self._authorize(scope)
            await self._app(scope, receive, sending)
        except ClientDisconnect:  # the 499 is only for the log
            if not begun:
                await ApiError(499, "the client disconnected").response(scope["path"])(scope, receive, send)
        except Exception as error:
            if begun:
                raise
            await _as_api_error(error, scope).response(scope["path"])(scope, receive, send)
        finally:
            self._service.in_flight -= 1

    def _authorize(self, scope: Scope):
        """Check the API key, and store its digest in ``state["tenant"]``.

        Raises:
          ApiError: 401, or 503 while the server ends.
        """
        path = scope["path"]
        state: dict[str, Any] = scope.setdefault("state", {})
        state["tenant"] = b"" if path in OPEN else self._service.keys.tenant(scope)
        if path not in WHILE_DRAINING and (self._service.draining or self._service.engine.closed):
            raise unavailable()


def _as_api_error(error: Exception, scope: Scope) -> ApiError:
    if isinstance(error, HTTPException):  # Starlette's, of paths and methods
        message = f"{error.detail}: {scope['method']} {shown(scope['path'])}"
        return ApiError(error.status_code, message, headers=error.headers)
    if isinstance(error, NotServing):
        return ApiError(503, str(error))
    return as_api_error(error, "a request failed")
