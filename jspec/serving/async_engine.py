"""Requests from asyncio: a thread steps the engine, and hands what is new to the event loops of those who asked."""

import asyncio
import atexit
import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar

import jax

from jspec._validation import require
from jspec.engine.inbox import Inbox, Progress
from jspec.engine.request import ActiveRequest, Request
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

    One thread steps the engine. It starts with the first request, sleeps while there is nothing to do, and ends with the
    process, if not before. ``jspec.generate`` and ``llm.engine`` can be used beside it, from other threads, and so can other
    event loops and other objects of this class: the requests of all of them are decoded together, and everybody gets
    only what belongs to them.

    ``async with AsyncEngine(llm) as engine:`` closes it at the end.

    Args:
      llm: what ``jspec.load`` returned.

    Attributes:
      llm: the same.
      error: what its thread met when it last stepped the engine; None if that went well. Requests are taken all the
        same, and the next step that goes well makes it None.
    """

    def __init__(self, llm: LLM):
        require(isinstance(llm, LLM), "llm", llm, "a model that jspec.load() returned")
        self.llm, self._engine = llm, llm.engine
        self._thread: threading.Thread | None = None
        self._news = threading.Condition()  # guards what follows, and wakes the thread
        self._arriving: collections.deque[_Stream] = collections.deque()  # of requests not submitted yet
        self._leaving: list[_Stream] = []  # whose callers have left, and whose requests are not given up yet
        self._compilations: set[Compilation] = set()  # for which callers wait
        self._closed = False
        self._workers = ThreadPoolExecutor(WORKERS, "jspec.AsyncEngine.prepare")
        self.error: BaseException | None = None
        # Only the thread uses these:
        self._inbox = Inbox(streams=True)
        self._streams: dict[int, _Stream] = {}  # of requests that were submitted, by order

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *_):
        await self.close()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        key: jax.Array | None = None,
        priority: int = 0,
        salt: str = "",
        **options,
    ) -> AsyncGenerator[Delta, None]:
        """Complete one prompt, and yield what is new after each call to the device.

        The request starts with the first step of the generator. It is given up, and its row is free for others, as soon as
        the generator is closed: by ``aclose()``, by cancelling the task that waits for it, or by losing it after
        ``break``. ``contextlib.aclosing`` closes it for sure, and at once.

        A caller that is slow does not hold the engine up: deltas wait for it in memory until it takes them.

        Args:
          prompt: text or token ids, as for ``jspec.generate``.
          params: how to sample, and when to end; None takes ``LLM.default_sampling_params``.
          key: a JAX key, in place of ``SamplingParams.seed``.
          priority: requests with a lower number go first.
          salt: only requests with the same salt share cached pages of their prompts.
          **options: fields of ``SamplingParams`` by name, instead of ``params``; fields that are not given come from
            ``LLM.default_sampling_params``.

        Yields:
          deltas; the last one has the result. Its ``finish_reason`` says ``error`` after an error of the device, and
          ``abort`` if the engine was closed.

        Raises:
          ValueError: the prompt is empty, too long, or several, or a value is out of range.
          TypeError: an option is unknown or given twice. The message says what may have been meant.
          QueueFull: ``max_waiting`` requests wait already.
          GrammarBusy: too many forms of other requests are being compiled.
          RuntimeError: the engine is closed, or its thread met an exception, which is the cause of this one.
        """
        form = StructuredOutputsParams.of(self._form(params, options))
        grammar = None if form is None else await self.grammar(form)
        options |= {"key": key, "priority": priority, "salt": salt}
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

        A few threads share all such work, so that the thread that steps the engine does not wait for many of them.

        Raises:
          RuntimeError: the engine is closed.
          Exception: what ``work`` raised.
        """
        with self._news:
            self._require_open()
            future = self._workers.submit(work)
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
            with self._news:
                self._require_open()
                self._compilations.add(compilation)
            future = asyncio.wrap_future(compilation)
            await asyncio.wait([future], timeout=grammars.limits.wait)
            grammars.require_begun(compilation)
            await asyncio.wait([future])
            if future.cancelled():
                self._require_open()
            return future.result()
        finally:
            compilation.cancel()
            with self._news:
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
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()
        streams = [_Stream(index, request, loop, queue) for index, request in enumerate(requests)]
        with self._news:
            self._require_open()
            self._engine.require_room(len(self._arriving) + len(streams) - 1)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="jspec.AsyncEngine", daemon=True)
                self._thread.start()
                atexit.register(self._stop)  # a thread that is in XLA when Python ends aborts the process
            self._arriving.extend(streams)
            self._news.notify()
        return Group(self, streams, queue)

    @property
    def closed(self) -> bool:
        """Whether nothing is served any more."""
        return self._closed

    async def close(self):
        """Give up what is under way, and stop the thread. Callers that wait get a last delta, which says ``abort``.

        Nothing happens if it is closed already. The model itself can be used further.
        """
        await asyncio.to_thread(self._stop)

    def _stop(self):
        """Close the engine, and wait for the thread to end."""
        with self._news:
            self._closed = True
            self._workers.shutdown(wait=False)  # what was taken is still done
            compilations = list(self._compilations)
            self._news.notify()
        for compilation in compilations:
            compilation.cancel()
        if self._thread is not None:
            self._thread.join()
        atexit.unregister(self._stop)

    def _leave(self, stream: "_Stream"):
        """Have a request given up that has not ended. Its caller takes nothing more."""
        with self._news:
            if not stream.ended:
                self._leaving.append(stream)
                self._news.notify()

    def _require_open(self):
        if self._closed:
            raise RuntimeError("the AsyncEngine is closed; make a new one of the same model")

    def _serve(self):
        """What the thread does until the engine is closed."""
        closed = False
        while not closed:
            try:
                closed, leaving = self._wait()
                self._submit()  # before some of them are given up
                self._give_up(leaving, everything=closed)
                if self._inbox.unfinished or self._inbox.items:
                    self._hand_out(self._engine.advance(self._inbox))
                    self.error = None
            except BaseException as error:  # whatever it is, nobody may be left waiting
                self._fail(error)

    def _wait(self) -> "tuple[bool, list[_Stream]]":
        """Sleep until there is something to do; returns whether the engine is closed, and whose callers have left."""
        with self._news:
            self._news.wait_for(
                lambda: self._closed or self._arriving or self._leaving or self._inbox.unfinished or self._inbox.items
            )
            leaving, self._leaving = self._leaving, []
            return self._closed, leaving

    def _submit(self):
        """Let the requests wait that have arrived."""
        while self._arriving:
            stream = self._arriving[0]
            stream.active = self._engine.submit(stream.request, self._inbox)
            self._streams[stream.active.order] = stream
            self._arriving.popleft()  # only now, so that it is always counted as waiting

    def _give_up(self, leaving: "Sequence[_Stream]", everything: bool = False):
        """Give up the requests whose callers have left, or all of them. Callers who still wait find that in the inbox."""
        for stream in leaving:
            stream.ended = True
        actives = [stream.active for stream in leaving if stream.active is not None]
        actives += self._inbox.unfinished.values() if everything else ()
        if actives:
            self._engine.give_up(actives)

    def _hand_out(self, news: Sequence[Progress]):
        """Send every progress to the caller whom it concerns."""
        letters = []
        for progress in news:
            order = progress.active.order
            stream = self._streams.pop(order) if progress.finished else self._streams[order]
            if stream.ended:
                continue
            try:
                letters.append((stream, self._engine.delta(progress)))
            except BaseException as error:  # it concerns this caller alone; a panic in tokenizers is no Exception
                letters.append((stream, _Failure(error)))
                self._leave(stream)
            stream.ended = letters[-1][1].finished
        self._post(letters)

    def _post(self, letters: "Sequence[tuple[_Stream, Delta | _Failure]]"):
        """Put each letter into its stream, with one visit to each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list] = {}
        for letter in letters:
            by_loop.setdefault(letter[0].loop, []).append(letter)
        for loop, some in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put, some)
            except RuntimeError:  # the loop is closed, and nobody can wait there any more
                for stream, _ in some:
                    self._leave(stream)

    def _fail(self, error: BaseException):
        """Let all callers know of an exception that came out of the engine, and begin anew."""
        self.error = error
        with self._news:
            streams = [*self._streams.values(), *self._arriving]
            self._arriving.clear()
            self._leaving.clear()
        inbox, self._inbox, self._streams = self._inbox, Inbox(streams=True), {}
        letters = [(stream, _Failure(error)) for stream in streams if not stream.ended]
        for stream in streams:
            stream.ended = True
        self._post(letters)
        with contextlib.suppress(BaseException):  # the next caller will know; it is tried again then
            self._engine.leave(inbox)


class Group:
    """Requests of one caller that were started together. Iterating yields what is new of each, until all have ended.

    It yields pairs: the index of a request, as ``AsyncEngine.start`` was given it, and a delta. Only the event loop in
    which it was made may use it.

    Raises:
      RuntimeError: the thread that steps the engine met an exception, which is the cause of this one.
    """

    def __init__(self, engine: AsyncEngine, streams: "Sequence[_Stream]", queue: "asyncio.Queue[_Letter]"):
        self._engine, self._streams, self._queue = engine, streams, queue
        self._unfinished = len(streams)

    def __aiter__(self) -> "Group":
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        if not self._unfinished:
            raise StopAsyncIteration
        index, delta = await self._queue.get()
        if isinstance(delta, _Failure):
            raise RuntimeError(f"the thread that steps the engine failed: {delta.error!r}") from delta.error
        self._unfinished -= delta.finished
        return index, delta

    def close(self):
        """Have those given up that have not ended; their rows are free before the next call to the device."""
        streams, self._streams = self._streams, ()
        for stream in streams:
            self._engine._leave(stream)

    def __del__(self):
        self.close()


@dataclasses.dataclass(eq=False)
class _Stream:
    """A request of a group, and where its caller waits for what is new.

    Attributes:
      index: its number in the group.
      request: what was asked for.
      loop: the caller's event loop.
      queue: what is new of the group. Only the loop puts something in.
      active: the request as the engine knows it, once it was submitted.
      ended: whether nothing more is put in: the last delta was sent, or the caller has left.
    """

    index: int
    request: Request
    loop: asyncio.AbstractEventLoop
    queue: "asyncio.Queue[_Letter]"
    active: ActiveRequest | None = None
    ended: bool = False


@dataclasses.dataclass(frozen=True)
class _Failure:
    """Takes the place of a last delta: an exception, instead of news."""

    error: BaseException
    finished: ClassVar[bool] = True


_Letter = tuple[int, Delta | _Failure]  # the index of a request in its group, and what is new of it


def _put(letters: "Sequence[tuple[_Stream, Delta | _Failure]]"):
    for stream, letter in letters:
        stream.queue.put_nowait((stream.index, letter))
