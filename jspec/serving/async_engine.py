"""Requests from asyncio: a thread steps the engine, and hands what is new to the event loops of those who asked."""

import asyncio
import atexit
import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import AsyncGenerator, Sequence
from typing import ClassVar

import jax

from jspec._arguments import require
from jspec.engine.inbox import Inbox, Progress
from jspec.engine.request import ActiveRequest, Request
from jspec.llm import LLM
from jspec.prompts import Prompt
from jspec.results import Delta
from jspec.sampling.params import SamplingParams


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
    """

    def __init__(self, llm: LLM):
        require(isinstance(llm, LLM), "llm", llm, "a model that jspec.load() returned")
        self.llm, self._engine = llm, llm.engine
        self._thread: threading.Thread | None = None
        self._news = threading.Condition()  # guards what follows, and wakes the thread
        self._arriving: collections.deque[_Stream] = collections.deque()  # of requests not submitted yet
        self._leaving: list[_Stream] = []  # whose callers have left, and whose requests are not given up yet
        self._closed = False
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
          RuntimeError: the engine is closed, or its thread met an exception, which is the cause of this one.
        """
        self._require_open()
        # In another thread, because a long prompt takes long to encode.
        ask = functools.partial(self._engine.request, key=key, priority=priority, salt=salt, **options)
        stream = self._open(await asyncio.to_thread(ask, prompt, params))
        try:
            while True:
                delta = await stream.queue.get()
                if isinstance(delta, _Failure):
                    raise RuntimeError(f"the thread that steps the engine failed: {delta.error!r}") from delta.error
                yield delta
                if delta.finished:
                    return
        finally:
            self._leave(stream)

    async def close(self):
        """Give up what is under way, and stop the thread. Callers that wait get a last delta, which says ``abort``.

        Nothing happens if it is closed already. The model itself can be used further.
        """
        await asyncio.to_thread(self._stop)

    def _open(self, request: Request) -> "_Stream":
        """Hand a request to the thread, which is started if there is none yet."""
        stream = _Stream(request, asyncio.get_running_loop(), asyncio.Queue())
        with self._news:
            self._require_open()
            self._engine.require_room(len(self._arriving))
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="jspec.AsyncEngine", daemon=True)
                self._thread.start()
                atexit.register(self._stop)  # a thread that is in XLA when Python ends aborts the process
            self._arriving.append(stream)
            self._news.notify()
        return stream

    def _stop(self):
        """Close the engine, and wait for the thread to end."""
        with self._news:
            self._closed = True
            self._news.notify()
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


@dataclasses.dataclass(eq=False)
class _Stream:
    """A request of ``generate``, and where its caller waits for what is new.

    Attributes:
      request: what was asked for.
      loop: the caller's event loop.
      queue: what is new. Only the loop puts something in.
      active: the request as the engine knows it, once it was submitted.
      ended: whether nothing more is put in: the last delta was sent, or the caller has left.
    """

    request: Request
    loop: asyncio.AbstractEventLoop
    queue: "asyncio.Queue[Delta | _Failure]"
    active: ActiveRequest | None = None
    ended: bool = False


@dataclasses.dataclass(frozen=True)
class _Failure:
    """Takes the place of a last delta: an exception, instead of news."""

    error: BaseException
    finished: ClassVar[bool] = True


def _put(letters: "Sequence[tuple[_Stream, Delta | _Failure]]"):
    for stream, letter in letters:
        stream.queue.put_nowait(letter)
