"""API keys: authentication, the prefix-cache salt of each tenant, and the paths that need no key."""

import contextlib
import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from starlette.requests import Request
from starlette.types import Scope

from jspec._validation import require
from jspec.serving.http.errors import ApiError

ENVIRONMENT = "JSPEC_API_KEY"
OPEN = ("/health", "/ping", "/")  # need no key; a browser that opens the page has none to send
WHILE_DRAINING = ("/health", "/ping", "/metrics")


class Tenant(NamedTuple):
    """Who has sent a request.

    Attributes:
      key: the digest of its API key, which the middleware has stored; empty if none is needed.
      name: of those who take turns: the key, or else the client's address, of which an IPv6 client has many.
    """

    key: bytes
    name: str


def tenant_of(http: Request) -> Tenant:
    """Who has sent a request."""
    key = http.scope["state"]["tenant"]
    host = http.client.host if http.client else ""
    with contextlib.suppress(ValueError):
        host = str(ipaddress.ip_network((host, 64), strict=False)) if ":" in host else host
    return Tenant(key, key.hex() or host)


class Keys:
    """The API keys of a server. A client sends one as ``Authorization: Bearer KEY``, or as ``x-api-key: KEY``.

    Only digests of the keys are stored, under a random secret of this process.

    Args:
      keys: the valid keys; with none, every client may use the server.

    Raises:
      ValueError: a key is empty, or has characters that are not allowed in a header.
    """

    def __init__(self, keys: Sequence[str] = ()):
        for key in keys:
            ok = isinstance(key, str) and key.isascii() and key.isprintable() and key.strip() == key != ""
            require(ok, "api_key", "(hidden)", "printable ASCII characters without spaces around them")
        self._secret = secrets.token_bytes(32)
        self._digests = [self._digest(key.encode()) for key in keys]

    @property
    def needed(self) -> bool:
        """Whether a client needs a key."""
        return bool(self._digests)

    def tenant(self, scope: Scope) -> bytes:
        """The digest of a request's key; empty if no key is needed.

        The comparison takes the same time for every key, and always compares with all valid keys.

        Raises:
          ApiError: 401.
        """
        if not self._digests:
            return b""
        headers = {name: value for name, value in reversed(scope["headers"])}  # the first of each name
        scheme, _, key = headers.get(b"authorization", b"Bearer " + headers.get(b"x-api-key", b"")).partition(b" ")
        digest, is_valid = self._digest(key.strip()), False
        for valid in self._digests:
            is_valid |= hmac.compare_digest(digest, valid)
        if scheme.lower() != b"bearer" or not is_valid:
            message = "no API key, or a wrong one: expected the header Authorization: Bearer KEY, or x-api-key: KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return digest

    def salt(self, tenant: bytes, cache_salt: str | None) -> str:
        """The salt of the prefix cache: requests share cached pages if both the key and ``cache_salt`` are the same."""
        return self._digest(tenant + (cache_salt or "").encode(), b"salt").hex() if tenant or cache_salt else ""

    def _digest(self, value: bytes, use: bytes = b"key") -> bytes:
        return hmac.digest(self._secret, use + b"\0" + value, hashlib.sha256)
