"""Main program of the process that tries grammars before the server compiles them, so that hostile ones do no harm.

A client's grammar may overflow the stack of llguidance's Rust code, or take minutes or gigabytes. So this process, which
holds only the tokenizer, forks a child for each grammar. The child has limits of CPU time, memory and stack, tries the
grammar, reports whether it can be used, and ends; or the kernel kills it. Forking takes milliseconds, since memory is
shared, and requires a single-threaded process, unlike the server.

For each grammar, the connection to the server brings one end of a new connection, for the grammar and the result. If the
server closes it, the child is killed. If the connection to the server ends, so does this process.
"""

import contextlib
import math
import os
import resource
import selectors
import signal
import socket
import threading
from typing import Any, NoReturn

from jspec.text.grammar.matcher import make_matcher, make_tokens, try_first_tokens
from jspec.text.grammar.messages import receive, send

STACK = 48 * 2**20  # bytes of the compiler's stack in the child; the server's threads have more
ARENA = 128 * 2**20  # bytes of addresses that glibc reserves for a thread, hardly any of which it uses
NICENESS = 10  # gives the server's threads precedence


def main(descriptor: str) -> int:
    """Try grammars until the connection to the server ends.

    The first message has the arguments of ``make_tokens``; the response is empty, or has ``error``.

    Args:
      descriptor: file descriptor of the connection to the server.
    """
    with socket.socket(fileno=int(descriptor)) as server:
        setup = receive(server)
        if setup is None:
            return 0
        try:
            tokens = make_tokens(**setup)
        except BaseException as error:  # a panic of Rust code is no Exception
            send(server, {"error": f"{type(error).__name__}: {error}"})
            return 1
        os.nice(NICENESS)
        send(server, {})
        _Trials(server, tokens).run()
    return 0


class _Trials:
    """Forks a child for each grammar, kills cancelled ones, and reports the end of those that died.

    Args:
      server: the connection to the server.
      tokens: llguidance's view of the tokenizer.
    """

    def __init__(self, server: socket.socket, tokens: Any):
        self._server, self._tokens = server, tokens
        self._children: dict[int, socket.socket] = {}  # the connection of each, by process id
        self._events = selectors.DefaultSelector()
        self._events.register(server, selectors.EVENT_READ)
        awake, wake = socket.socketpair()
        for end in (awake, wake):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self._events.register(awake, selectors.EVENT_READ)
        self._awake, self._wake = awake, wake

    def run(self):
        while True:
            ready = [key.fileobj for key, _ in self._events.select()]
            if self._awake in ready:
                self._awake.recv(4096)
            self._reap()
            for pid, connection in list(self._children.items()):
                if connection in ready:  # no message follows a grammar, so the connection was closed
                    os.kill(pid, signal.SIGKILL)
                    self._events.unregister(connection)
            if self._server in ready and not self._take():
                break
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)

    def _take(self) -> bool:
        """Fork a child for the next grammar; returns False if the server has closed its connection."""
        try:
            message, descriptors, *_ = socket.recv_fds(self._server, 1, 1)
        except ConnectionError:
            return False
        if not message:
            return False
        connection = socket.socket(fileno=descriptors[0])
        asked = receive(connection)
        if asked is None:
            connection.close()
            return True
        pid = os.fork()
        if pid == 0:
            for other in (self._server, *self._children.values()):
                other.close()
            _try(connection, self._tokens, **asked)
        self._children[pid] = connection
        self._events.register(connection, selectors.EVENT_READ)
        return True

    def _reap(self):
        """Report the exit code of each child that has ended without a result."""
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection, code = self._children.pop(pid), os.waitstatus_to_exitcode(status)
            with contextlib.suppress(KeyError):
                self._events.unregister(connection)
            with connection, contextlib.suppress(OSError):  # the server does not wait for it any more
                if code:
                    send(connection, {"code": code})


def _try(connection: socket.socket, tokens: Any, grammar: str, seconds: float, memory: int) -> NoReturn:
    """In a child: try a grammar, report the result over the connection, and exit.

    Args:
      connection: to the server.
      tokens: llguidance's view of the tokenizer.
      grammar: as llguidance takes it.
      seconds, memory: as of ``GrammarLimits``.
    """
    signal.set_wakeup_fd(-1)
    # Messages of Rust's panics do not belong into the server's log.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    _limit(seconds, memory)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    answer: dict[str, Any] = {}

    def run():
        try:
            try_first_tokens(tokens, make_matcher(tokens, grammar))
        except BaseException as error:  # a panic of Rust code is no Exception
            answer["error"] = str(error) or type(error).__name__

    threading.stack_size(STACK)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    answer["bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    with contextlib.suppress(OSError):
        send(connection, answer)
    os._exit(0)


def _limit(seconds: float, memory: int):
    """Have the kernel kill this process if it exceeds the limits."""
    rounded_up = math.ceil(seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (rounded_up, rounded_up + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(FileNotFoundError), open("/proc/self/statm") as file:  # Linux alone has it
        used = int(file.read().split()[0]) * resource.getpagesize()
        addresses = used + memory + STACK + ARENA
        resource.setrlimit(resource.RLIMIT_AS, (addresses, addresses))
    signal.setitimer(signal.ITIMER_PROF, seconds)  # finer than RLIMIT_CPU; its signal ends the process
