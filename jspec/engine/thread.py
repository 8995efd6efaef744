"""The engine's own thread, and how others tell it what to do."""

import atexit
import collections
import dataclasses
import functools
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from jspec.engine import jax_settings
from jspec.engine.client import Cancel, Client, Deliver, Failure, Submission
from jspec.engine.core import EngineCore

# Seconds after which a caller that waits looks whether the thread lives. Not every signal wakes a caller that waits.
PATIENCE = 0.1

_WAKE, _STOP = "wake", "stop"


@dataclasses.dataclass(eq=False)
class Call:
    """A command to the engine's thread: call a function.

    Attributes:
      function: what to call.
      idle: whether only when no request waits or is under way.
      answer: gets its result and None, or None and what it raised.
      left: not empty when nobody waits for the answer any more.
    """

    function: Callable[[], Any]
    idle: bool
    answer: "queue.SimpleQueue[tuple[Any, BaseException | None]]" = dataclasses.field(default_factory=queue.SimpleQueue)
    left: list[bool] = dataclasses.field(default_factory=list)


class EngineThread:
    """A thread that steps an engine until the engine is collected, Python ends, or an exception ends it.

    Others put commands into its queue, and wait for outputs on queues of their own. What they call for that is written in C
    and done at once, so that neither a signal nor another thread comes between. The thread has no reference to the engine
    while it waits for a command.

    Args:
      core: what it steps.
      settings: JAX's settings by name that the thread is to have otherwise than a thread that begins now.
      replaces: the thread that was ended by an exception and left the core in any state; None if there was none.

    Attributes:
      arriving: what was submitted and not taken yet; the thread takes it before it obeys a command.
      view: JAX's settings as the thread had them when it last looked.
      error: what ended the thread; until the first step that goes well, what ended the one before.
      ended: whether it serves nobody any more.
    """

    def __init__(self, core: EngineCore, settings: dict[str, Any], replaces: "EngineThread | None"):
        # Its ``put`` can be called anywhere, by a destructor within itself too.
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._taken: collections.deque[Any] = collections.deque()  # commands that were looked at and not obeyed yet
        self._core = weakref.ref(core, self._commands.put)  # wakes this thread, which then ends
        self._settings, self._anew = settings, replaces is not None
        self.arriving: collections.deque[Submission] = collections.deque()
        self.view: jax_settings.View | None = None
        self.error = replaces and replaces.error
        self.ended = self._stopped = False
        self._thread = threading.Thread(target=self._run, name="jspec.engine", daemon=True)
        # It ends before JAX does, which was imported earlier: a thread that is in XLA then aborts the process.
        atexit.register(self._stop)
        self._thread.start()

    @property
    def stopped(self) -> bool:
        """Whether Python ends."""
        return self._stopped

    def require_other(self):
        """Raise a RuntimeError if this thread itself asks, which would wait for itself."""
        if self._thread.ident == threading.get_ident():
            raise RuntimeError(
                "the engine is busy with a step that called this; a callback cannot use the engine that calls it"
            )

    def client(self, number: int, outputs: Any, deliver: Deliver, streams: bool) -> Client:
        """A new client, which has submitted nothing."""
        cancel = functools.partial(self._commands.put, Cancel(number, leaves=True))
        return Client(number, outputs, deliver, streams, cancel)

    def submit(self, submission: Submission):
        """Have requests served.

        Raises:
          RuntimeError: the thread has ended.
        """
        self.arriving.append(submission)
        self._commands.put(_WAKE)
        if self.ended:  # before it could see them, perhaps
            raise Failure(self._reason()).raised()

    def post(self, command: "Cancel | Call"):
        """Have the thread obey a command, between two steps."""
        self._commands.put(command)

    def call(self, function: Callable[[], Any], idle: bool = False) -> Any:
        """Have the thread call a function, between two steps; its result.

        Args:
          function: what to call.
          idle: wait until no request waits or is under way.

        Raises:
          RuntimeError: the thread has ended, or is the caller.
          Exception: what the function raised.
        """
        self.require_other()
        call = Call(function, idle)
        try:
            self._commands.put(call)
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
            self._commands.put(_WAKE)  # an interrupt may have come before that of ``submit``

    # What follows is for the thread itself.

    def commands(self) -> collections.deque[Any]:
        """All commands that are there, the oldest first. Who obeys one takes it out."""
        while not self._commands.empty():
            self._taken.append(self._commands.get())
        return self._taken

    @property
    def is_stopping(self) -> bool:
        """Whether it has been told to end."""
        return _STOP in self.commands()

    def _run(self):
        try:
            with jax_settings.applied(self._settings):
                self.view, busy = jax_settings.view(), False
                while busy is not None:
                    busy = self._serve(busy)
        except BaseException as error:  # whatever it is, nobody may be left waiting
            self.error = error
        core = self._core()
        lost = [] if core is None else core.lose()
        self.ended = True  # from here on, callers begin another thread
        lost = {submission.client: [] for submission in self.arriving} | dict(lost)
        self.arriving.clear()
        failure = Failure(self._reason())
        for client, orders in lost.items():
            client.deliver([(client, [failure])])
            for order in orders:
                client.unfinished.pop(order, None)
        atexit.unregister(self._stop)

    def _serve(self, busy: bool) -> bool | None:
        """Obey commands, and make a step if there is anything to do; returns whether there is more to do, and None if the
        thread is to end."""
        if not busy and not self.commands():
            self._taken.append(self._commands.get())
        core = self._core()
        if core is None or self.is_stopping:
            return None
        if self._anew:  # only now: an interrupt may have left a thread that begins without callers
            core.begin_anew()
            self._anew = False
        self.view = jax_settings.view()
        return core.serve(self)

    def _reason(self) -> BaseException:
        return self.error or RuntimeError("Python is ending")

    def _stop(self):
        """Have the thread end, and wait for that."""
        self._stopped = True
        self._commands.put(_STOP)
        if self._thread.is_alive():  # it may never have begun, or have been left behind by a fork
            self._thread.join()
