"""What a server says of itself before it is measured."""

import asyncio
import time
from collections.abc import Mapping

import aiohttp

from jspec.bench.client import beginning

PAUSE = 0.5  # seconds between two looks at a server that is not there yet
PATIENCE = aiohttp.ClientTimeout(total=30)  # with a server that listens and says nothing


async def models_of(
    client: aiohttp.ClientSession, url: str, headers: Mapping[str, str], seconds: float = 0.0
) -> list[str]:
    """The names of a server's models; none if it does not tell. That is also how one knows that it is there.

    Args:
      client: the client.
      url: the server's, without a path.
      headers: of HTTP.
      seconds: how long to wait for a server that is not there yet.

    Raises:
      ValueError: nothing listens there, or it refuses the API key.
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
    async with client.get(f"{url}/v1/models", headers=headers, timeout=PATIENCE) as response:
        if response.status in (401, 403):
            raise ValueError(
                f"{url} refuses to answer ({await beginning(response)}): expected its API key in OPENAI_API_KEY"
            )
        if response.status != 200:
            return []
        try:
            return [str(model["id"]) for model in (await response.json(content_type=None))["data"]]
        except (ValueError, TypeError, LookupError, RecursionError):
            return []
