"""One caller at a time: the others wait, and can be interrupted while they do."""

import threading


class Caller:
    """Somebody who may have the turn.

    Attributes:
      thread: the thread that last did something for this caller. It is that of the call, unless the call is a generator
        that moves between threads.
      came: how many steps had ended when this caller came.
      taken: not empty once this caller has the turn.
    """

    def __init__(self, came: int):
        self.thread = threading.current_thread()
        self.came = came
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
            try:
                if caller.taken:
                    turn.holder = None
                    turn.lock.release()
            finally:
                turn.waiting.pop(caller, None)

    Any thread may give it back: a generator may be closed, or collected, in another one than it was started in.

    The lock itself is not fair: a thread that gives it back and wants it again is often faster than those that wait. Steps
    are long and come one after the other, so whoever wants the turn for a step asks with ``try_to_take``, looks at
    ``others_go_first`` when it has come, and then gives it back without a step. Nobody who waits sees more than one step
    begin. Nor can steps be put off for ever: only those go first who came before the last step ended.

    Attributes:
      lock: locked while somebody has the turn.
      holder: who has it.
      waiting: who waits for it in ``take``; the values mean nothing.
      num_steps: how many steps have ended. Whoever makes one counts it.
    """

    def __init__(self):
        self.lock = threading.Lock()
        self.holder: Caller | None = None
        self.waiting: dict[Caller, None] = {}
        self.num_steps = 0

    def caller(self, refusal: str) -> Caller:
        """A new caller of this thread, which may now wait for the turn.

        Raises:
          RuntimeError: this thread has the turn already and would wait for itself; ``refusal`` says so.
        """
        holder = self.holder
        if holder is not None and holder.thread is threading.current_thread():
            raise RuntimeError(refusal)
        return Caller(self.num_steps)

    def take(self, caller: Caller):
        """Wait for the turn, for something else than a step."""
        self.waiting[caller] = None
        self.try_to_take(caller, -1)
        self.waiting.pop(caller, None)

    def try_to_take(self, caller: Caller, patience: float):
        """Wait for the turn, at most ``patience`` seconds; a negative number is for ever. ``caller.taken`` says whether it
        came."""
        # ``filter`` and ``extend`` are written in C: nothing can come between the lock's answer and the note of it.
        caller.taken.extend(filter(None, map(self.lock.acquire, (True,), (patience,))))
        if caller.taken:
            self.holder = caller

    @property
    def others_go_first(self) -> bool:
        """Whether somebody waits since before the last step ended, so that no other step may begin now."""
        return any(caller.came < self.num_steps for caller in tuple(self.waiting))
