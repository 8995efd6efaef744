"""What the engine's thread does: it takes requests, makes steps, and tells subscribers what is new."""

import weakref

from jspec.engine.frontend import Frontend
from jspec.engine.loop import Loop
from jspec.engine.mailbox import Cancel, Mailbox, ThreadCall
from jspec.engine.pausing import Pausing
from jspec.engine.request import FAILED, LIVE, Progress, Request
from jspec.engine.runner.recompilation_guard import CompilationError, CompilationGuard, CompilationWarning
from jspec.engine.subscriber import Deliver, Failure, Output, Subscriber


class EngineCore:
    """The loop with its subscribers. Only the engine's thread calls it.

    Args:
      loop: makes the steps.
      frontend: makes deltas.
      guard: watches the steps.

    Attributes:
      loop: as given.
      pausing: whether steps are made.
    """

    def __init__(self, loop: Loop, frontend: Frontend, guard: CompilationGuard):
        self.loop, self._frontend, self._guard = loop, frontend, guard
        self._subscribers: dict[int, Subscriber] = {}  # that have requests, by their number
        self._calls: list[ThreadCall] = []  # that wait until no request is under way
        self._calling: ThreadCall | None = None
        self._outputs: dict[Subscriber, list[Output]] = {}  # that are not in the subscribers' queues yet
        self._ended: list[tuple[Subscriber, int]] = []  # subscribers and the ids of their requests that end with these
        self._mailbox: Mailbox | None = None
        self.pausing = Pausing(loop.scheduler)
        this = weakref.ref(self)  # the runner is a part of this
        loop.runner.batch.is_wanted = lambda: (core := this()) is None or core._is_wanted()

    def serve(self, mailbox: Mailbox) -> bool:
        """Obey commands, and make a step if there is anything to do; returns whether there is more to do."""
        self._mailbox = mailbox
        self._take_arriving(mailbox)
        while commands := mailbox.commands():
            command = commands.popleft()
            self._take_arriving(mailbox)  # a subscriber submits before it cancels
            if isinstance(command, Cancel):
                self._cancel(command)
            elif not isinstance(command, str):
                self._calls.append(command)
        self._make_calls()
        # Requests that come, or wait, let such a call pass: it would never have its turn where they always do.
        self.loop.scheduler.admits = self.pausing.mode is None and not any(call.idle for call in self._calls)
        if self.pausing.mode is None:
            self._submit_pending()
        if self.pausing.has_step:
            self._step()
            mailbox.error = None
        self._collect()
        if not self.pausing.has_step:
            self.hand_out()
        if self.pausing.has_step or self._calls:
            return True
        return self.pausing.mode is None and any(subscriber.pending for subscriber in self._subscribers.values())

    def begin_anew(self):
        """Have a sound loop again, after an exception has ended a thread anywhere in it."""
        self.loop.fail(RuntimeError("the engine's thread has ended"), waiting=True)
        self.loop.take_progress()  # subscribers know it

    def lose(self) -> list[tuple[Subscriber, list[int]]]:
        """Forget all subscribers and calls; returns the subscribers, with the ids of their requests that have not ended."""
        lost = [(subscriber, list(subscriber.unfinished)) for subscriber in self._subscribers.values()]
        for left in (self._subscribers, self._calls, self._outputs, self._ended):
            left.clear()
        return lost

    def abort_all(self):
        """End every request, whether it is under way or waits, and tell its subscriber."""
        for subscriber in self._subscribers.values():
            while subscriber.pending:
                self._submit(subscriber, subscriber.pending.popleft(), self.loop.next_order())
        scheduler = self.loop.scheduler
        waiting = [active for _, active in scheduler.waiting]
        scheduler.waiting.clear()  # at once: to look for each of them in the queue takes long
        self.loop.abort([*scheduler.under_way, *waiting])
        self._collect()
        self.hand_out()

    def _take_arriving(self, mailbox: Mailbox):
        while mailbox.arriving:
            subscriber, requests, orders = mailbox.arriving[0]
            self._subscribers[subscriber.number] = subscriber
            if orders is None:
                subscriber.pending.extend(requests)
            else:
                for request, order in zip(requests, orders, strict=True):
                    self._submit(subscriber, request, order)
            mailbox.arriving.popleft()  # only now, so that requests are always counted as waiting

    def _submit(self, subscriber: Subscriber, request: Request, order: int):
        subscriber.unfinished[order] = self.loop.submit(request, subscriber, order)

    def _submit_pending(self):
        """Let pending requests wait for which there is room. A subscriber that has no others always has room for one."""
        for subscriber in self._subscribers.values():
            while subscriber.pending and (self.loop.scheduler.has_room() or not subscriber.unfinished):
                self._submit(subscriber, subscriber.pending[0], self.loop.next_order())
                subscriber.pending.popleft()

    def _cancel(self, cancel: Cancel):
        subscriber = self._subscribers.get(cancel.subscriber)
        if subscriber is None:
            return
        if cancel.leaves:
            del self._subscribers[subscriber.number]
        if cancel.order is None:
            subscriber.pending.clear()
            self.loop.abort(list(subscriber.unfinished.values()))
        elif cancel.order in subscriber.unfinished:
            self.loop.abort([subscriber.unfinished[cancel.order]])
        self._collect()
        self.hand_out()

    def _make_calls(self):
        """Call what is to be called now. Exceptions are those of who has asked."""
        for call in list(self._calls):
            if call.idle and self.pausing.has_step and self.loop.scheduler.under_way:
                continue
            self._calls.remove(call)
            self._calling = call
            try:
                self.pausing.require_callable(call)
                call.answer.put((None if call.left else call.function(), None))
            except BaseException as error:
                call.answer.put((None, error))
            finally:
                self._calling = None

    def _step(self):
        """Make a step. What the guard has to say ends the requests that took part in it."""
        try:
            with self._guard.watching():
                self.loop.step(when_sent=self.hand_out)
        except (CompilationError, CompilationWarning) as error:
            for active, _, finished, _ in self.loop.progress:
                if finished:
                    active.outcome, active.error = FAILED, error
            self.loop.fail(error)

    def _is_wanted(self) -> bool:
        """Whether anybody waits for what is being compiled."""
        self.hand_out()
        mailbox = self._mailbox
        if mailbox is None or mailbox.is_stopping:
            return mailbox is None
        if self._calling is not None:
            return not self._calling.left
        cancels = [command for command in mailbox.commands() if isinstance(command, Cancel) and command.order is None]
        left = {cancel.subscriber for cancel in cancels}
        return any(subscriber.number not in left for subscriber in self._subscribers.values() if subscriber.unfinished)

    def _collect(self):
        """Make outputs of what has happened to requests."""
        for progress in self.loop.take_progress():
            active, subscriber = progress.active, progress.active.subscriber
            if subscriber is None or subscriber.number not in self._subscribers or active.end_delivered:
                continue
            if subscriber.streams:
                self._outputs.setdefault(subscriber, []).append(self._delta(progress))
            elif progress.finished:
                self._outputs.setdefault(subscriber, []).append(active)
            if active.outcome != LIVE:
                self._ended.append((subscriber, active.order))

    def hand_out(self):
        """Put what is new into the queues of subscribers.

        This comes when the next programs have been sent: a subscriber that computes in Python holds the engine's thread up.
        """
        by_kind: dict[Deliver, list[tuple[Subscriber, list[Output]]]] = {}
        for subscriber, outputs in self._outputs.items():
            by_kind.setdefault(subscriber.deliver, []).append((subscriber, outputs))
        for deliver, some in by_kind.items():
            deliver(some)
        # Only now, so that a subscriber that has been told nothing knows that more comes.
        for subscriber, order in self._ended:
            subscriber.unfinished.pop(order, None)
            if not subscriber.unfinished and not subscriber.pending:
                self._subscribers.pop(subscriber.number, None)
        self._outputs, self._ended = {}, []

    def _delta(self, progress: Progress) -> Output:
        """What is new of a request, with text. A tokenizer that raises ends its request alone."""
        active = progress.active
        try:
            delta = self._frontend.delta(progress)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic of the Rust code in tokenizers is no Exception
            self.loop.abort([active])
            active.outcome, active.error, active.end_delivered = FAILED, error, True
            try:
                return self._frontend.delta(progress._replace(finished=True))
            except Exception as again:
                return Failure(again)
        active.end_delivered = delta.finished
        return delta
