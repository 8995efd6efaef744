"""Requests from asyncio: what is new of them comes to the event loops of those who asked."""

import asyncio
import collections
import dataclasses
import functools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jspec._validation import require
from jspec.engine.request import Request
from jspec.engine.subscriber import Failure, Output, Subscriber
from jspec.llm import LLM
from jspec.outputs import Delta
from jspec.sampling.params import SamplingParams
from jspec.sampling.structured import StructuredOutputsParams
from jspec.text.grammar.grammars import Compilation, CompiledGrammar
from jspec.text.prompts import Prompt

# Threads that encode prompts. Python runs one thread at a time, and with twenty of them the one that steps the engine
# got its turn so late that 512 prompts at once cost 3% of an H200's rate.
WORKERS = 4

T = TypeVar("T")


class AsyncEngine:
    """Serves the requests of asyncio programs, as many at once as there are callers.

    The engine's own thread serves them. ``jspec.generate`` and ``llm.engine`` can be used beside it, from any thread, and so
    can other event loops and other objects of this class: the requests of all of them are decoded together, and everybody
    gets only what belongs to them.

    ``async with AsyncEngine(llm) as engine:`` closes it at the end.

    Args:
      llm: what ``jspec.load`` returned.

    Attributes:
      llm: the same.

    Example::

        async def complete(prompt: str) -> str:
            async with jspec.AsyncEngine(jspec.load("path/to/target")) as engine:
                return "".join([delta.text async for delta in engine.generate(prompt, max_tokens=64)])
    """

    def __init__(self, llm: LLM):
        require(isinstance(llm, LLM), "llm", llm, "a model that jspec.load() returned")
        self.llm, self._engine = llm, llm.engine
        self._subscribers: set[Subscriber] = set()  # whose groups have not ended
        self._compilations: set[Compilation] = set()  # for which callers wait
        self._closed = False
        self._workers = ThreadPoolExecutor(WORKERS, "jspec.AsyncEngine.prepare")

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *_):
        await self.close()

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options
    ) -> AsyncGenerator[Delta, None]:
        """Complete one prompt, and yield what is new after each call to the device.

        The request starts with the first step of the generator. It is cancelled, and its row is free for others, as soon as
        the generator is closed: by ``aclose()``, by cancelling the task that waits for it, or by losing it after
        ``break``. ``contextlib.aclosing`` closes it for sure, and at once.

        A caller that is slow does not hold the engine up: deltas wait for it in memory until it takes them.

        Args:
          prompt, params, **options: as for ``Engine.request``: ``key``, ``priority``, ``salt``, ``tenant``, and fields of
            ``SamplingParams`` by name.

        Yields:
          deltas; the last one has the result. Its ``finish_reason`` says ``error`` after an error of the device, and
          ``abort`` if the engine was closed.

        Raises:
          ValueError, TypeError: as ``Engine.request`` does.
          QueueFull: ``max_waiting`` requests wait already.
          GrammarBusy: too many forms of other requests are being compiled.
          RuntimeError: the engine is closed, or an exception ended its thread, which is the cause of this one.
        """
        form = StructuredOutputsParams.of(self._form(params, options))
        grammar = None if form is None else await self.grammar(form)
        request = await self.prepare(functools.partial(self._engine.request, prompt, params, **options))
        group = self.start([request])
        del grammar  # the request has it
        try:
            async for _, delta in group:
                yield delta
        finally:
            group.close()

    def _form(self, params: SamplingParams | None, options: Mapping[str, Any]) -> Any:
        """The form that a request asks for with its options, with its parameters, or by default."""
        if isinstance(params, SamplingParams):
            return params.structured_outputs
        default = self._engine.frontend.default_params.structured_outputs
        return options.get("structured_outputs", default)

    async def prepare(self, work: Callable[[], T]) -> T:
        """The result of ``work``, such as encoding a long prompt, which another thread does.

        A few threads share all such work, so that the engine's thread does not wait for many of them.

        Raises:
          RuntimeError: the engine is closed.
          Exception: what ``work`` raised.
        """
        self._require_open()
        try:
            future = self._workers.submit(work)
        except RuntimeError:
            self._require_open()  # it may have been closed meanwhile
            raise
        return await asyncio.wrap_future(future)

    async def grammar(self, form: StructuredOutputsParams) -> CompiledGrammar:
        """What requests with this form need, compiled by threads that do nothing else. While a caller holds it, making such
        requests takes no time for it. If the caller is cancelled, nothing is compiled for it any further.

        Raises:
          ValueError: the form cannot be had.
          GrammarBusy: too many grammars are being compiled.
          RuntimeError: the engine is closed.
        """
        grammars = self._engine.frontend.grammars
        compilation = grammars.compile(form)
        try:
            self._compilations.add(compilation)
            self._require_open()
            future = asyncio.wrap_future(compilation)
            await asyncio.wait([future], timeout=grammars.limits.wait)
            grammars.require_begun(compilation)
            await asyncio.wait([future])
            if future.cancelled():
                self._require_open()
            return future.result()
        finally:
            compilation.cancel()
            self._compilations.discard(compilation)

    def start(self, requests: Sequence[Request]) -> "Group":
        """Let requests wait that belong together: all of them, or none if there is no room for all.

        Args:
          requests: made by ``llm.engine.request``, at least one.

        Returns:
          what yields their deltas. It has to be closed; lost, it closes itself.

        Raises:
          QueueFull: ``max_waiting`` leaves no room for so many.
          RuntimeError: the engine is closed, or no event loop runs in this thread.
        """
        self._require_open()
        self._engine.require_room(len(requests), requests[0].tenant)
        queue: asyncio.Queue[list[Output]] = asyncio.Queue()
        subscriber, ids = self._engine.handle.start(requests, queue, _ToLoop(asyncio.get_running_loop()))
        group = Group(subscriber, ids, self._subscribers.discard)
        self._subscribers.add(subscriber)
        if self._closed:  # meanwhile, so that nobody may know of the subscriber
            group.close()
            self._require_open()
        return group

    @property
    def error(self) -> BaseException | None:
        """What ended the engine's thread; None if nothing did, or once another thread has made a step."""
        return self._engine.handle.error

    @property
    def closed(self) -> bool:
        """Whether nothing is served any more."""
        return self._closed

    async def close(self):
        """Cancel what is under way, and take no more. Callers that wait get a last delta, which says ``abort``.

        Nothing happens if it is closed already. The model itself can be used further.
        """
        await asyncio.to_thread(self._close)

    def _close(self):
        self._closed = True
        self._workers.shutdown(wait=False)  # what was taken is still done
        for compilation in list(self._compilations):
            compilation.cancel()
        self._engine.handle.cancel(list(self._subscribers))

    def _require_open(self):
        if self._closed:
            raise RuntimeError("the AsyncEngine is closed; make a new one of the same model")


class Group:
    """Requests of one caller that were started together. Iterating yields what is new of each, until all have ended.

    It yields pairs: the index of a request, as ``AsyncEngine.start`` was given it, and a delta. Only the event loop in
    which it was made may use it.

    Raises:
      RuntimeError: an exception ended the engine's thread, which is the cause of this one.

    Example::

        async def print_all(engine: jspec.AsyncEngine, requests):  # made by ``llm.engine.request``
            async for index, delta in engine.start(requests):
                print(index, delta.text)
    """

    def __init__(self, subscriber: Subscriber, ids: Sequence[int], ended: Callable[[Subscriber], None]):
        self._subscriber, self._ended = subscriber, ended
        self._indices = {id: index for index, id in enumerate(ids)}  # of the requests that have not ended
        self._deltas: collections.deque[Delta] = collections.deque()

    def __aiter__(self) -> "Group":
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        if not self._indices:
            raise StopAsyncIteration
        while not self._deltas:
            for output in await self._subscriber.outputs.get():
                if isinstance(output, Failure):
                    self.close()
                    raise output.raised()
                self._deltas.append(output)
        delta = self._deltas.popleft()
        index = self._indices[delta.id]
        if delta.finished:
            del self._indices[delta.id]
            if not self._indices:
                self.close()
        return index, delta

    def close(self):
        """Cancel those that have not ended; their rows are free before the next call to the device."""
        if self._indices:
            self._subscriber.cancel()
        self._ended(self._subscriber)

    def __del__(self):
        self.close()


@dataclasses.dataclass(frozen=True)
class _ToLoop:
    """Puts outputs into the ``asyncio.Queue`` of each subscriber of one event loop, with one visit to the loop."""

    loop: asyncio.AbstractEventLoop

    def __call__(self, outputs: Sequence[tuple[Subscriber, list[Output]]]):
        try:
            self.loop.call_soon_threadsafe(_put, outputs)
        except RuntimeError:  # the loop is closed, and nobody can wait there any more
            for subscriber, _ in outputs:
                subscriber.cancel()


def _put(outputs: Sequence[tuple[Subscriber, list[Output]]]):
    for subscriber, some in outputs:
        subscriber.outputs.put_nowait(some)
