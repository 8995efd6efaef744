"""The process in which grammars are compiled before the server compiles them: what they do to it harms nobody.

A grammar of a stranger may overflow the stack of llguidance's Rust code, take minutes or gigabytes. So this process, which
holds nothing but the tokenizer, forks a child for each grammar. The child has limits of CPU time, memory and stack, tries
the grammar, says whether it can be used, and ends; or the kernel ends it. Forking takes milliseconds, since memory is
shared, and needs a process with a single thread, which a server is not.

One connection leads to the server. For each grammar it brings one end of another one, over which the grammar comes and the
answer goes. If the server closes it, nobody waits for the answer any more, and the child is killed. If the connection to
the server ends, so does this process.
"""

import contextlib
import math
import os
import resource
import selectors
import signal
import socket
import threading
import time
from typing import Any, NoReturn

from jspec.text.grammar.matcher import make_matcher, make_tokens, try_first_tokens
from jspec.text.grammar.messages import receive, send

STACK = 48 * 2**20  # bytes for the child's compiler; the server's threads have more
ARENA = 128 * 2**20  # bytes of addresses that glibc reserves for a thread, hardly any of which it uses
NICENESS = 10  # the server's own threads go first


def main(descriptor: str) -> int:
    """Try grammars until the server is gone.

    The first message is of the tokenizer, arguments of ``make_tokens``; the answer is empty, or has ``error``.

    Args:
      descriptor: of the connection to the server.
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
    """Starts a child for each grammar that comes, and looks after all of them.

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
                if connection in ready:  # nothing is sent behind a grammar: it was closed
                    os.kill(pid, signal.SIGKILL)
                    self._events.unregister(connection)
            if self._server in ready and not self._take():
                break
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)

    def _take(self) -> bool:
        """Start a child for the next grammar; returns False if there will be no more."""
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
        """Say of each child that has ended without an answer what ended it."""
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
    """In a child: try a grammar, say over the connection whether it can be used, and end.

    Args:
      connection: to the server.
      tokens: llguidance's view of the tokenizer.
      grammar: as llguidance takes it.
      seconds, memory: as of ``GrammarLimits``.
    """
    signal.set_wakeup_fd(-1)
    # What Rust says of itself when it is ended is not for the server's log.
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
    answer["seconds"] = time.process_time()
    answer["bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    with contextlib.suppress(OSError):
        send(connection, answer)
    os._exit(0)


def _limit(seconds: float, memory: int):
    """Have the kernel end this process if it takes more."""
    whole = math.ceil(seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (whole, whole + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(FileNotFoundError), open("/proc/self/statm") as file:  # Linux alone has it
        used = int(file.read().split()[0]) * resource.getpagesize()
        most = used + memory + STACK + ARENA
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.setitimer(signal.ITIMER_PROF, seconds)  # finer than RLIMIT_CPU; its signal ends the process
