"""How the threads of callers reach the engine's: they submit requests, wait for what is new of them, and cancel them."""

import contextlib
import functools
import itertools
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from jspec.engine import jax_settings
from jspec.engine.core import EngineCore
from jspec.engine.forks import remember_process, require_not_forked
from jspec.engine.mailbox import Cancel, Submission, ThreadCall
from jspec.engine.pausing import CLOSED, NotServing
from jspec.engine.request import Request
from jspec.engine.subscriber import Deliver, Failure, Subscriber, deliver
from jspec.engine.thread import EngineThread
from jspec.models.placement import named_devices


class EngineHandle:
    """The engine's thread, for everybody else. It begins with the first caller, and anew after an exception has ended it.

    It has JAX's settings of the thread that makes this. A caller whose settings differ is refused, but for the default
    device where devices were named (``placed_on``). Methods that reach the thread raise what ``running`` raises, and a
    RuntimeError if the thread ends.

    Args:
      core: what the thread steps.
    """

    def __init__(self, core: EngineCore):
        self._core = core
        self._next_number = functools.partial(next, itertools.count())
        require_not_forked()
        remember_process()
        self._devices, self._settings = named_devices(), jax_settings.of_this_thread_alone()
        if self._devices is not None:
            self._settings["default_device"] = self._devices[0]
        self._thread: EngineThread | None = None
        self._beginning = threading.Lock()

    @property
    def error(self) -> BaseException | None:
        """What ended the thread; None once another has made a step."""
        return self._thread and self._thread.mailbox.error

    @property
    def arriving(self) -> list[Submission]:
        """What was submitted and has not reached the scheduler yet."""
        return [] if self._thread is None else list(self._thread.mailbox.arriving)

    def require_usable(self):
        """Raise a RuntimeError while the model is asleep, or closed."""
        self._core.pausing.require_usable()

    def running(self, always: bool = False) -> EngineThread:
        """The engine's thread, for a caller that may use it; with ``always``, also while the model is asleep.

        Raises:
          RuntimeError: the caller is called by the engine's own thread, the process was forked, or Python ends; or the model
            is asleep or closed.
          ValueError: JAX's settings of the caller's thread are not those of the engine's.
        """
        require_not_forked()
        if not always:
            self.require_usable()
        thread = self._thread
        if thread is None or thread.ended:
            thread = self._begun()
        thread.require_other()
        view = jax_settings.view()
        if self._devices is not None:  # of which callers need not know
            view = jax_settings.with_default_device(view, self._devices[0])
        if view != thread.view:  # it may have changed for all threads
            jax_settings.require_same(view, thread.call(jax_settings.view, always=always))
        return thread

    def start(self, requests: Sequence[Request], outputs: Any, deliver: Deliver) -> tuple[Subscriber, list[int]]:
        """Have requests of a new subscriber served, which streams, and whose queue ``deliver`` fills; returns it and their
        ids."""
        thread = self.running()
        subscriber = thread.subscriber(self._next_number(), outputs, deliver, streams=True)
        try:
            return subscriber, self._submit(thread, subscriber, requests)
        except BaseException:
            subscriber.cancel()
            raise

    def add(self, request: Request, subscriber: Subscriber) -> int:
        """Have a request of a subscriber served that may have others; returns its id."""
        (id,) = self._submit(self.running(), subscriber, [request])
        return id

    def _submit(self, thread: EngineThread, subscriber: Subscriber, requests: Sequence[Request]) -> list[int]:
        orders = [self._core.loop.next_order() for _ in requests]
        thread.submit(Submission(subscriber, requests, orders))
        return orders

    def outputs(self, requests: Sequence[Request], streams: bool) -> Generator[Any, None, None]:
        """Serve requests, and yield what is new of each, or each when it has ended unless ``streams``.

        Those that have not ended when the generator is closed are cancelled. However many there are, they find room.
        """
        thread, outputs, unfinished = self.running(), queue.SimpleQueue(), len(requests)
        subscriber = thread.subscriber(self._next_number(), outputs, deliver, streams)
        cancel = subscriber.cancel
        try:
            thread.submit(Submission(subscriber, requests))
            while unfinished:
                for output in thread.wait_for(outputs):
                    if isinstance(output, Failure):
                        raise output.raised()
                    unfinished -= not streams or output.finished
                    yield output
        finally:
            if unfinished:
                cancel()  # written in C: no interrupt comes before it is done

    def cancel(self, subscribers: Iterable[Subscriber]):
        """Cancel all requests of subscribers, who are told of their ends before this returns."""
        thread = self._thread
        if thread is not None and not thread.ended:
            for subscriber in subscribers:
                thread.mailbox.post(Cancel(subscriber.number))
            with contextlib.suppress(RuntimeError):  # the thread has ended, and so have the requests
                thread.call(lambda: None)

    def post(self, function: Callable[[], Any]):
        """Have the thread call a function, and wait for nothing."""
        if self._thread is not None:
            self._thread.mailbox.post(ThreadCall(function, idle=False))

    def close(self, why: str, last: Callable[[], None]):
        """End the thread for good, after it has called ``last``; from now on callers are refused, who are told why.

        Raises:
          RuntimeError: the caller is called by the engine's own thread.
        """
        thread = self._thread
        if thread is not None:
            thread.require_other()
        with self._beginning:
            self._core.pausing.refuses, thread = why, self._thread
        if thread is not None and not thread.ended:
            with contextlib.suppress(RuntimeError):  # the thread has ended, and so have the requests
                thread.call(last, always=True)
            thread.stop(why)

    def _begun(self) -> EngineThread:
        with self._beginning:
            if self._core.pausing.refuses == CLOSED:  # meanwhile
                raise NotServing(CLOSED)
            if self._thread is None or self._thread.ended:
                if self._thread is not None and self._thread.stopped:
                    raise RuntimeError("Python is ending, and the engine has ended")
                self._thread = EngineThread(self._core, self._settings, self._thread)
            return self._thread
