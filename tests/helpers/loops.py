"""Tests that are coroutines."""

import asyncio
import functools
from collections.abc import Awaitable, Callable

SECONDS = 120  # after which a test hangs


def in_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test that runs a coroutine in an event loop of its own."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), SECONDS))

    return run
