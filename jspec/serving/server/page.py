"""The page at ``/``, for trying the model in a browser."""

import base64
import functools
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from jspec.serving.generation.service import Service

_FILE = Path(__file__).with_suffix(".html")


async def page(_: Service, __: Request) -> Response:
    """The page, a single file without secrets that uses the server's API as any other client."""
    html, headers = _page_and_headers()
    return Response(html, media_type="text/html", headers=headers)


@functools.cache
def _page_and_headers() -> tuple[str, dict[str, str]]:
    """The page and its headers, which allow only scripts of the file and connections to this server."""
    html = _FILE.read_text("utf-8")
    allowed = {
        "default-src": "'none'",
        "script-src": _digest(html, "script"),
        "style-src": _digest(html, "style"),
        "img-src": "data:",  # the empty icon
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    policy = "; ".join(f"{name} {sources}" for name, sources in allowed.items())
    headers = {"content-security-policy": policy, "referrer-policy": "no-referrer", "x-content-type-options": "nosniff"}
    return html, {**headers, "cache-control": "no-cache"}


def _digest(html: str, tag: str) -> str:
    """The content-security-policy source of the single element with this tag."""
    (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
