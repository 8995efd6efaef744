"""The model names of a server, asked before the measurement; also the check that it is ready."""

import asyncio
import time
from collections.abc import Mapping

import aiohttp

from jspec.bench.client import beginning

PAUSE = 0.5  # seconds between two attempts to reach a server that is not ready
TIMEOUT = aiohttp.ClientTimeout(total=30)  # seconds, for a server that accepts the connection and sends nothing


async def models_of(
    client: aiohttp.ClientSession, url: str, headers: Mapping[str, str], seconds: float = 0.0
) -> list[str]:
    """The names of a server's models; an empty list if it has no list of models.

    Args:
      client: the HTTP client.
      url: the server's, without a path.
      headers: of HTTP.
      seconds: how long to wait for a server that is not ready.

    Raises:
      ValueError: the server cannot be reached, or refuses the API key.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return await _models(client, url, headers)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"no server answers at {url} ({str(error) or type(error).__name__}): expected one that is running; "
                    "see --base-url, --host and --port, or start one with jspec serve"
                ) from None
        await asyncio.sleep(PAUSE)


async def _models(client: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> list[str]:
    async with client.get(f"{url}/v1/models", headers=headers, timeout=TIMEOUT) as http_response:
        if http_response.status in (401, 403):
            raise ValueError(
                f"{url} refuses to answer ({await beginning(http_response)}): expected its API key in OPENAI_API_KEY"
            )
        if http_response.status != 200:
            return []
        try:
            return [str(model["id"]) for model in (await http_response.json(content_type=None))["data"]]
        except (ValueError, TypeError, LookupError, RecursionError):
            return []
