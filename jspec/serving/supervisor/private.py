"""A server for one client, who knows a secret."""

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from jspec.serving.openai.errors import ApiError

HEADER = "x-jspec-keeper"


class Private:
    """Lets requests through to ``app`` that have the token in the header ``HEADER``; others get 403.

    The address of a member is one of loopback or of a private network, where others can connect, too.
    """

    def __init__(self, app: ASGIApp, token: str):
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send):
        shown = next((value for name, value in scope.get("headers", ()) if name == HEADER.encode()), b"")
        if scope["type"] == "http" and not hmac.compare_digest(shown, self._token):
            await ApiError(403, "this address is for the keeper of the server alone").response()(scope, receive, send)
            return
        await self._app(scope, receive, send)
