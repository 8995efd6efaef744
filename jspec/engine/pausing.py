"""What keeps the engine's thread from making steps, for a while or for good: it is paused, sleeps or is closed."""

from jspec.engine.mailbox import ThreadCall
from jspec.engine.scheduler.scheduler import Scheduler

ASLEEP = "the model is asleep: call wake_up()"
CLOSED = "the model is closed, and has left its devices: load it again with jspec.load()"


class NotServing(RuntimeError):
    """The model serves nobody now: it is asleep, closed, or its weights are incomplete. The message says what helps."""


class Pausing:
    """Whether the engine's thread makes steps. Only that thread changes it; any thread may look.

    Attributes:
      mode: None while it makes steps; ``wait`` if it makes those of requests under way alone; ``keep`` if it makes none.
      refuses: why callers are refused, ``ASLEEP`` or ``CLOSED``; None if they are not.
    """

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self.mode: str | None = None
        self.refuses: str | None = None
        self._by: object = None  # the caller that may still take its pause back; None if there have been others

    def pause(self, mode: str, by: object):
        """Make only the steps that ``mode`` allows; ``by`` is the caller."""
        self._by = by if self.mode is None else None
        self.mode = mode

    def resume(self):
        """Make every step again."""
        self.mode = None

    def take_back(self, by: object):
        """Resume for a caller that has given up while it paused, unless others have paused, too."""
        if self._by is by:
            self.resume()

    @property
    def has_step(self) -> bool:
        """Whether there is a step to make."""
        if self.mode is None:
            return self._scheduler.unfinished
        return self.mode != "keep" and bool(self._scheduler.under_way)

    def require_usable(self):
        """Refuse a caller while the model is asleep, or closed.

        Raises:
          NotServing: it is.
        """
        if self.refuses is not None:
            raise NotServing(self.refuses)

    def require_callable(self, call: ThreadCall):
        """Refuse a call that cannot be made now, and would wait for somebody else.

        Raises:
          RuntimeError: it cannot.
        """
        if not call.always:
            self.require_usable()
        if call.idle and self.mode == "keep" and (kept := len(self._scheduler.under_way)):
            raise RuntimeError(
                f"{kept} requests stand still after pause(mode='keep'), and this waits for requests under way: call "
                "resume() so that they end, or pause(mode='abort') to end them"
            )
