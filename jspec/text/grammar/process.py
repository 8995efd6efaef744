"""The server's side of the process that tries grammars before the server compiles them."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import weakref
from typing import Any

from jspec._child_process import python_command
from jspec.text.grammar.limits import GrammarLimits
from jspec.text.grammar.messages import receive, send
from jspec.text.grammar.worker import STACK

log = logging.getLogger("jspec.grammar")

PATIENCE = 20.0  # seconds of waiting for each CPU second, before the machine counts as too busy
START_SECONDS = 120.0  # within which the process has to have read the tokenizer


class GrammarBusy(RuntimeError):
    """A grammar could not be compiled now, because the machine or the process is busy. A later attempt may succeed."""


class Trial:
    """The trial of a grammar, which can be cancelled."""

    def __init__(self):
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self.cancelled = False

    def cancel(self):
        """Cancel the trial, at any time; its child is killed."""
        with self._lock:
            self.cancelled = True
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)

    def connect(self, connection: socket.socket | None):
        """Set the connection of the trial; None once it has ended."""
        with self._lock:
            self._connection = connection
        if self.cancelled:
            self.cancel()


class GrammarProcess:
    """Tries grammars in another process, so that none can crash, fill or block this one.

    The process starts with the first grammar, or with ``start``, and is restarted if it is lost. It ends with this object or
    with this process.

    Args:
      setup: arguments of ``jspec.text.grammar.matcher.make_tokens``.
    """

    def __init__(self, setup: dict[str, Any]):
        self._setup, self._lock = setup, threading.Lock()
        self._process: Any = None  # a subprocess.Popen
        self._control: socket.socket | None = None
        self._end = lambda: None

    def start(self):
        """Start the process, and wait until it has read the tokenizer.

        Raises:
          ValueError: llguidance cannot read the tokenizer.
          GrammarBusy: the process does not start.
        """
        with self._lock:
            self._started()

    def try_out(self, grammar: str, limits: GrammarLimits, trial: Trial) -> int:
        """Try a grammar; returns the bytes of memory of compiling it and its first tokens.

        Raises:
          ValueError: it cannot be used.
          GrammarBusy: the grammar could not be tried now, or ``trial`` was cancelled.
        """
        result = self._result(grammar, limits, trial)
        if result is None and not trial.cancelled:  # the process was lost meanwhile
            result = self._result(grammar, limits, trial)
        if result is None:
            raise GrammarBusy("the process that compiles grammars does not respond: try again later")
        if result.get("code") == -signal.SIGKILL:  # the machine ran out of memory, perhaps because of other processes
            raise GrammarBusy("the process that compiled the grammar was killed: try again later")
        if "code" in result:
            why = _ending(result["code"], limits)
            log.warning("a grammar of %d bytes is refused: %s", len(grammar), why)
            raise ValueError(why)
        if "error" in result:
            raise ValueError(result["error"])
        return result["bytes"]

    def close(self):
        """End the process and all trials. It is restarted by a later trial."""
        with self._lock:
            self._end()

    def _result(self, grammar: str, limits: GrammarLimits, trial: Trial) -> dict[str, Any] | None:
        """The process's result for a grammar; None if the connection was lost."""
        ours, theirs = socket.socketpair()
        with ours:
            ours.settimeout(PATIENCE * (limits.seconds + 1))
            with theirs, self._lock:
                try:
                    socket.send_fds(self._started(), [b"g"], [theirs.fileno()])
                except OSError:  # it has just ended
                    self._end()
                    socket.send_fds(self._started(), [b"g"], [theirs.fileno()])
            trial.connect(ours)
            try:
                send(ours, {"grammar": grammar, "seconds": limits.seconds, "memory": limits.memory})
                return receive(ours)
            except TimeoutError:
                raise GrammarBusy("the machine is too busy to compile a grammar: try again later") from None
            except OSError:
                return None
            finally:
                trial.connect(None)

    def _started(self) -> socket.socket:
        """The connection to the process, which is started if it does not run."""
        if self._control is not None and self._control.fileno() >= 0 and self._process.poll() is None:
            return self._control
        self._end()
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                python_command("jspec.text.grammar.worker", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is for this process
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},  # threads do not survive a fork
            )
        self._process, self._control = process, ours
        self._end = weakref.finalize(self, _end, process, ours)
        ours.settimeout(START_SECONDS)
        try:
            send(ours, self._setup)
            ready = receive(ours)
        except OSError as error:
            self._end()
            raise GrammarBusy(f"the process that compiles grammars did not start: {error}") from None
        if ready is None or "error" in ready:
            self._end()
            if ready is None:
                raise GrammarBusy(f"the process that compiles grammars ended with code {process.returncode}")
            raise ValueError(ready["error"])
        ours.settimeout(None)
        return ours


def _end(process: subprocess.Popen, control: socket.socket):
    control.close()  # makes the process end
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _ending(code: int, limits: GrammarLimits) -> str:
    """Why a child ended without a result."""
    ended = -code
    if ended in (signal.SIGPROF, signal.SIGXCPU):
        return f"compiling it and its first tokens takes more than {limits.seconds:g} CPU seconds"
    stack, memory = STACK // 2**20, limits.memory // 2**20
    if ended == signal.SIGSEGV:
        return (
            f"its parts are nested or refer to each other too deeply: compiling it takes more than {stack} MB of stack"
        )
    if ended == signal.SIGABRT:
        return f"compiling it and its first tokens takes more than {memory} MB of memory, or {stack} MB of stack"
    return f"compiling it ended the process that tried it, with code {code}"
