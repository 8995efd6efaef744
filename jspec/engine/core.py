"""What the engine's thread does: it takes requests, makes steps, and tells clients what is new."""

import weakref
from typing import TYPE_CHECKING

from jspec.engine.client import Cancel, Client, Deliver, Failure, Output
from jspec.engine.frontend import Frontend
from jspec.engine.loop import Loop, Progress
from jspec.engine.request import FAILED, LIVE, Request
from jspec.engine.runner.recompilation_guard import CompilationError, CompilationGuard, CompilationWarning
from jspec.outputs import Delta

if TYPE_CHECKING:
    from jspec.engine.thread import Call, EngineThread


class EngineCore:
    """The loop with its clients. Only the engine's thread calls it.

    Args:
      loop: makes the steps.
      frontend: makes deltas.
      guard: watches the steps.
    """

    def __init__(self, loop: Loop, frontend: Frontend, guard: CompilationGuard):
        self.loop, self._frontend, self._guard = loop, frontend, guard
        self._clients: dict[int, Client] = {}  # that have requests, by their number
        self._calls: list[Call] = []  # that wait until nothing else is to do
        self._calling: Call | None = None
        self._outputs: dict[Client, list[Output]] = {}  # that are not in the clients' queues yet
        self._ended: list[tuple[Client, int]] = []  # clients and the ids of their requests that end with these
        self._thread: EngineThread | None = None
        this = weakref.ref(self)  # the runner is a part of this
        loop.runner.is_wanted = lambda: (core := this()) is None or core._is_wanted()

    def serve(self, thread: "EngineThread") -> bool:
        """Obey commands, and make a step if there is anything to do; returns whether there is more to do."""
        self._thread = thread
        self._take_arriving(thread)
        while commands := thread.commands():
            command = commands.popleft()
            self._take_arriving(thread)  # a client submits before it cancels
            if isinstance(command, Cancel):
                self._cancel(command)
            elif not isinstance(command, str):
                self._calls.append(command)
        self._make_calls()
        self._submit_pending()
        if self.loop.scheduler.unfinished:
            self._step()
            thread.error = None
        self._collect()
        if not self.loop.scheduler.unfinished:
            self.hand_out()
        more = self.loop.scheduler.unfinished or bool(self._calls)
        return more or any(client.pending for client in self._clients.values())

    def begin_anew(self):
        """Have a sound loop again, after an exception has ended a thread anywhere in it."""
        self.loop.fail(RuntimeError("the engine's thread has ended"), waiting=True)
        self.loop.take_progress()  # clients know it

    def lose(self) -> list[tuple[Client, list[int]]]:
        """Forget all clients and calls; returns the clients, with the ids of their requests that have not ended."""
        lost = [(client, list(client.unfinished)) for client in self._clients.values()]
        for left in (self._clients, self._calls, self._outputs, self._ended):
            left.clear()
        return lost

    def _take_arriving(self, thread: "EngineThread"):
        while thread.arriving:
            client, requests, orders = thread.arriving[0]
            self._clients[client.number] = client
            if orders is None:
                client.pending.extend(requests)
            else:
                for request, order in zip(requests, orders, strict=True):
                    self._submit(client, request, order)
            thread.arriving.popleft()  # only now, so that requests are always counted as waiting

    def _submit(self, client: Client, request: Request, order: int):
        client.unfinished[order] = self.loop.submit(request, client, order)

    def _submit_pending(self):
        """Let pending requests wait for which there is room. A client that has no others always has room for one."""
        for client in self._clients.values():
            while client.pending and (self.loop.scheduler.has_room() or not client.unfinished):
                self._submit(client, client.pending[0], self.loop.next_order())
                client.pending.popleft()

    def _cancel(self, cancel: Cancel):
        client = self._clients.get(cancel.client)
        if client is None:
            return
        if cancel.leaves:
            del self._clients[client.number]
        if cancel.order is None:
            client.pending.clear()
            self.loop.abort(list(client.unfinished.values()))
        elif cancel.order in client.unfinished:
            self.loop.abort([client.unfinished[cancel.order]])
        self._collect()
        self.hand_out()

    def _make_calls(self):
        """Call what is to be called now. Exceptions are those of who has asked."""
        for call in list(self._calls):
            if call.idle and self.loop.scheduler.unfinished:
                continue
            self._calls.remove(call)
            self._calling = call
            try:
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
        thread = self._thread
        if thread is None or thread.is_stopping:
            return thread is None
        if self._calling is not None:
            return not self._calling.left
        cancels = [command for command in thread.commands() if isinstance(command, Cancel) and command.order is None]
        left = {cancel.client for cancel in cancels}
        return any(client.number not in left for client in self._clients.values() if client.unfinished)

    def _collect(self):
        """Make outputs of what has happened to requests."""
        for progress in self.loop.take_progress():
            active, client = progress.active, progress.active.client
            if client is None or client.number not in self._clients or active.end_delivered:
                continue
            if client.streams:
                self._outputs.setdefault(client, []).append(self._delta(progress))
            elif progress.finished:
                self._outputs.setdefault(client, []).append(active)
            if active.outcome != LIVE:
                self._ended.append((client, active.order))

    def hand_out(self):
        """Put what is new into the queues of clients.

        This comes when the next programs have been sent: a client that computes in Python holds the engine's thread up.
        """
        by_kind: dict[Deliver, list[tuple[Client, list[Output]]]] = {}
        for client, outputs in self._outputs.items():
            by_kind.setdefault(client.deliver, []).append((client, outputs))
        for deliver, some in by_kind.items():
            deliver(some)
        for client, order in self._ended:  # only now, so that a client that has been told nothing knows that more comes
            client.unfinished.pop(order, None)
            if not client.unfinished and not client.pending:
                self._clients.pop(client.number, None)
        self._outputs, self._ended = {}, []

    def _delta(self, progress: Progress) -> Output:
        """What is new of a request, with text. A tokenizer that raises ends its request alone."""
        active = progress.active
        try:
            delta = self._delta_of(progress, progress.finished)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic of the Rust code in tokenizers is no Exception
            self.loop.abort([active])
            active.outcome, active.error, active.end_delivered = FAILED, error, True
            try:
                return self._delta_of(progress, True)
            except Exception as again:
                return Failure(again)
        active.end_delivered = delta.finished
        return delta

    def _delta_of(self, progress: Progress, finished: bool) -> Delta:
        active, token_ids, _, start = progress
        runner = self.loop.runner
        about = active.order, active, token_ids, start, finished
        return self._frontend.delta(*about, runner.longest_text, runner.num_draft_tokens)
