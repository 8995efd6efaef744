"""The engine's own thread, and how others wait for what it does."""

import atexit
import functools
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from jspec.engine import jax_settings
from jspec.engine.core import EngineCore
from jspec.engine.mailbox import Cancel, Mailbox, Submission, ThreadCall
from jspec.engine.subscriber import Deliver, Failure, Subscriber

# Seconds after which a caller that waits looks whether the thread lives. Not every signal wakes a caller that waits.
PATIENCE = 0.1


class EngineThread:
    """A thread that steps an engine until the engine is collected, Python ends, or an exception ends it.

    Others put commands into its mailbox, and wait for outputs on queues of their own. What they call for that is written in
    C and done at once, so that neither a signal nor another thread comes between. The thread has no reference to the engine
    while it waits for a command.

    Args:
      core: what it steps.
      settings: JAX's settings by name that the thread is to have otherwise than a thread that begins now.
      replaces: the thread that was ended by an exception and left the core in any state; None if there was none.

    Attributes:
      mailbox: what others want of it.
      view: JAX's settings as the thread had them when it last looked.
      ended: whether it serves nobody any more.
      stopped: whether Python ends, or the model was closed.
    """

    def __init__(self, core: EngineCore, settings: dict[str, Any], replaces: "EngineThread | None"):
        self.mailbox = Mailbox(replaces and replaces.mailbox.error)
        self._core = weakref.ref(core, self.mailbox.post)  # wakes this thread, which then ends
        self._settings, self._anew = settings, replaces is not None
        self.view: jax_settings.View | None = None
        self.ended = self.stopped = False
        self._why = "Python is ending"
        self._thread = threading.Thread(target=self._run, name="jspec.engine", daemon=True)
        # It ends before JAX does, which was imported earlier: a thread that is in XLA then aborts the process.
        atexit.register(self.stop)
        self._thread.start()

    def require_other(self):
        """Raise a RuntimeError if this thread itself asks, which would wait for itself."""
        if self._thread.ident == threading.get_ident():
            raise RuntimeError(
                "the engine is busy with a step that called this; a callback cannot use the engine that calls it"
            )

    def subscriber(self, number: int, outputs: Any, deliver: Deliver, streams: bool) -> Subscriber:
        """A new subscriber, which has submitted nothing."""
        cancel = functools.partial(self.mailbox.post, Cancel(number, leaves=True))
        return Subscriber(number, outputs, deliver, streams, cancel)

    def submit(self, submission: Submission):
        """Have requests served.

        Raises:
          RuntimeError: the thread has ended.
        """
        self.mailbox.submit(submission)
        if self.ended:  # before it could see them, perhaps
            raise Failure(self._reason()).raised()

    def call(self, function: Callable[[], Any], idle: bool = False, always: bool = False) -> Any:
        """Have the thread call a function, between two steps; its result.

        Args:
          function: what to call.
          idle: wait until no request is under way. Those that wait let it pass.
          always: call it also while the model is asleep.

        Raises:
          RuntimeError: the thread has ended, or is the caller; or the model is asleep, or is paused and keeps requests that
            the call would wait for.
          Exception: what the function raised.
        """
        self.require_other()
        call = ThreadCall(function, idle, always)
        try:
            self.mailbox.post(call)
            result, error = self.wait_for(call.answer)
        finally:
            call.left.append(True)
        try:
            if error is not None:
                raise error
            return result
        finally:
            del error  # whose traceback has this frame

    def wait_for(self, answers: queue.SimpleQueue, wanted: Callable[[], bool] = lambda: True) -> Any:
        """The next item of a queue that the thread fills; None if it is not wanted any more.

        Raises:
          RuntimeError: the thread has ended.
        """
        while True:
            try:
                return answers.get(timeout=PATIENCE)
            except queue.Empty:
                pass
            alive = self._thread.is_alive() and not self.ended
            if not alive and answers.empty():
                raise Failure(self._reason()).raised()
            if not wanted():
                return None
            self.mailbox.wake()  # an interrupt may have come before that of ``submit``

    # What follows is for the thread itself.

    def _run(self):
        try:
            with jax_settings.applied(self._settings):
                self.view, busy = jax_settings.view(), False
                while busy is not None:
                    busy = self._serve(busy)
        except BaseException as error:  # whatever it is, nobody may be left waiting
            self.mailbox.error = error
        core, arriving = self._core(), self.mailbox.arriving
        lost = [] if core is None else core.lose()
        self.ended = True  # from here on, callers begin another thread
        lost = {submission.subscriber: [] for submission in arriving} | dict(lost)
        arriving.clear()
        failure = Failure(self._reason())
        for subscriber, orders in lost.items():
            subscriber.deliver([(subscriber, [failure])])
            for order in orders:
                subscriber.unfinished.pop(order, None)
        atexit.unregister(self.stop)

    def _serve(self, busy: bool) -> bool | None:
        """Obey commands, and make a step if there is anything to do; returns whether there is more to do, and None if the
        thread is to end."""
        if not busy:
            self.mailbox.wait()
        core = self._core()
        if core is None or self.mailbox.is_stopping:
            return None
        if self._anew:  # only now: an interrupt may have left a thread that begins without callers
            core.begin_anew()
            self._anew = False
        self.view = jax_settings.view()
        return core.serve(self.mailbox)

    def _reason(self) -> BaseException:
        return self.mailbox.error or RuntimeError(self._why)

    def stop(self, why: str = "Python is ending"):
        """Have the thread end, and wait for that."""
        self.stopped, self._why = True, why
        self.mailbox.stop()
        if self._thread.is_alive():  # it may never have begun, or have been left behind by a fork
            self._thread.join()
