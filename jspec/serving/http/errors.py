"""Errors that clients get, in OpenAI's and in Anthropic's format."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.responses import JSONResponse

log = logging.getLogger("jspec.serve")

SHOWN = 100  # characters of a value that a message quotes

ANTHROPIC = "/v1/messages"  # paths that begin so have Anthropic's errors
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Ends a request with a status and a message for the client.

    Args:
      status: the HTTP status.
      message: what is wrong, and what would be right.
      param: the field of the request; None if the error concerns no field.
      code: OpenAI's code for this error, or None.
      headers: headers of the response.
      details: further fields of an error in Anthropic's form, or None.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ):
        super().__init__(message)
        self.details = details
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """``{"error": {"message", "type", "param", "code"}}``."""
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, usual)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str) -> JSONResponse:
        """The response to a request for a path, in the form that clients of this path read."""
        body = anthropic_body(self) if path.startswith(ANTHROPIC) else self.body
        status = 529 if path.startswith(ANTHROPIC) and self.status == 503 else self.status
        return JSONResponse(body, status, self.headers)


@contextlib.contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Give errors of a chat an endpoint's own ``names`` of its fields. The words that clients know of a prompt stay."""
    try:
        yield
    except ApiError as error:
        param, name = error.param or "", names.get(error.param or "")
        if name is None or error.code == "context_length_exceeded":
            raise
        message = error.message.replace(param, name, 1)
        raise ApiError(error.status, message, name, error.code, error.headers) from None


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """An error in Anthropic's form: ``{"type": "error", "error": {"type", "message"}}``, perhaps with ``details``."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    details = {} if error.details is None else {"details": error.details}
    return {"type": "error", "error": {"type": kind, "message": error.message, **details}}


def as_api_error(error: Exception, what: str) -> ApiError:
    """An exception as the client gets it; one that is not meant for it is logged with ``what`` happened."""
    if isinstance(error, ApiError):
        return error
    log.error(what, exc_info=error)
    return ApiError(500, "the server failed; its log says why")


def wrong(param: str, value: Any, expected: str, code: str | None = None) -> ApiError:
    """The error of a field with a bad value, which names field, value and what would be right."""
    return ApiError(400, f"{param}={shown(value)}: expected {expected}", param, code)


def require_that(ok: bool, param: str, value: Any, expected: str):
    """Raise the error of ``wrong`` unless ``ok``."""
    if not ok:
        raise wrong(param, value, expected)


def flag(param: str, value: Any) -> bool:
    """The boolean of a field that no type declares; False if it is missing.

    Raises:
      ApiError: 400; it is something else.
    """
    require_that(value is None or isinstance(value, bool), param, value, "true or false")
    return value is True


def shown(value: Any) -> str:
    """The first characters of a value's ``repr``, for a message."""
    if isinstance(value, str | bytes | list):
        value = value[:SHOWN]  # before ``repr`` makes a text of all of it
    elif isinstance(value, dict):
        value = dict(list(value.items())[:8])
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 4]} ..."
