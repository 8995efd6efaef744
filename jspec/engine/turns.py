"""One caller at a time: the others wait, and can be interrupted while they do."""

import threading


class Caller:
    """Somebody who may have the turn.

    Attributes:
      thread: the thread that last did something for this caller. It is that of the call, unless the call is a generator
        that moves between threads.
      taken: not empty once this caller has the turn.
    """

    def __init__(self):
        self.thread = threading.current_thread()
        self.taken: list[bool] = []


class Turn:
    """A lock that is not lost, wherever its holder is interrupted, and that knows which thread holds it.

    Python raises KeyboardInterrupt, and whatever other signal handlers raise, when a function of Python's begins and
    when any call returns. So a method that gives the turn back could be interrupted before it has done anything. This
    is how the turn is taken and given back::

        caller = turn.caller("this thread would wait for itself")
        try:
            turn.take(caller)
            ...
        finally:
            if caller.taken:
                turn.holder = None
                turn.lock.release()

    Any thread may give it back: a generator may be closed, or collected, in another one than it was started in.

    Attributes:
      lock: locked while somebody has the turn.
      holder: who has it.
    """

    def __init__(self):
        self.lock = threading.Lock()
        self.holder: Caller | None = None

    def caller(self, refusal: str) -> Caller:
        """A new caller of this thread, which may now wait for the turn.

        Raises:
          RuntimeError: this thread has the turn already and would wait for itself; ``refusal`` says so.
        """
        holder = self.holder
        if holder is not None and holder.thread is threading.current_thread():
            raise RuntimeError(refusal)
        return Caller()

    def take(self, caller: Caller, patience: float = -1):
        """Wait for the turn, at most ``patience`` seconds; a negative number is for ever. ``caller.taken`` says whether it
        came."""
        # ``filter`` and ``extend`` are written in C: nothing can come between the lock's answer and the note of it.
        caller.taken.extend(filter(None, map(self.lock.acquire, (True,), (patience,))))
        if caller.taken:
            self.holder = caller
