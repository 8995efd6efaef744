"""An engine whose devices belong to several processes: process 0 leads, and the others follow.

A program over the devices of several processes runs once all of them have sent it, in the same order. So the leader decides
what to send, and broadcasts it to the followers: the program, and its small array of numbers on the host. Each follower
sends the same program to its own devices. Weights, caches and logits never pass through here.

Processes find each other through JAX (``jax.distributed``). The leader's messages go over a socket of its own, since
JAX's own broadcasts would wait for the devices.
"""

import atexit
import contextlib
import os
import pickle
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

ADDRESS = "JSPEC_HOST_IP"  # environment variable: the leader's address, where its host's name does not resolve
PATIENCE = 60.0  # seconds that processes wait for each other when an engine is made
LAST_WORDS = 5.0  # seconds that a process may take to notice by itself that process 0 is gone
NOTICED = 1.0  # seconds in which the end of a process is noticed that has made a program fail
_TOKEN_BYTES, _ADDRESS_BYTES, _PLACE_BYTES = 32, 512, 4
_TICK = 0.5  # seconds between two checks of whether a watch is still needed
_GLANCE = 2e-4  # seconds between two looks at whether a program has ended
_END = ("end",)
_when_lost: Callable[[str], None] | None = None


class ProcessLost(RuntimeError):
    """Another process of the group has ended."""


def when_lost(call: Callable[[str], None]):
    """Set a function that is called with the reason, in a thread, as soon as another process of the group is lost.

    Without it a loss is noticed when a message is sent or awaited. But a sum over GPUs that waits for a lost process may
    never return, so under a supervisor the function ends this process. It applies to engines that are made afterwards.
    """
    global _when_lost
    _when_lost = call


class Leader:
    """Process 0, which broadcasts messages to the followers. A thread watches their connections.

    Raises:
      ProcessLost: not all other processes connected within ``PATIENCE`` seconds.
    """

    def __init__(self):
        token = secrets.token_bytes(_TOKEN_BYTES)
        with socket.create_server(("", 0)) as server:
            server.settimeout(PATIENCE)
            host, port = socket.gethostname(), server.getsockname()[1]
            _from_process_0(token + f"{host} {_own_address(host)} {port}".encode())
            joined = [_accepted(server, token) for _ in range(jax.process_count() - 1)]
        self._sockets, self._names = [list(column) for column in zip(*joined, strict=True)]
        self._files = [connection.makefile("wb") for connection in self._sockets]
        self._lost: str | None = None  # the name of the first process that was lost
        self._closed = False
        self._answers, self._answered = 0, threading.Condition()  # one byte for each answer of a follower
        threading.Thread(target=self._watch, name="jspec.Leader.watch", daemon=True).start()

    def broadcast(self, *message: Any):
        """Send a message to all followers; returns before they have executed it.

        Raises:
          ProcessLost: one of them has ended.
        """
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self.require_all()
        for file, name in zip(self._files, self._names, strict=True):
            try:
                file.write(data)
                file.flush()
            except (OSError, ValueError) as error:
                raise _loss_of(name) from error

    def require_all(self, within: float = 0.0):
        """Raise ``ProcessLost`` if a follower has ended, or ends within so many seconds."""
        if within:
            with self._answered:
                self._answered.wait_for(lambda: self._lost, within)
        if self._lost:
            raise _loss_of(self._lost)

    def wait_for(self, arrays: Any):
        """Wait until this process has these arrays, or the exception of the program that computes them.

        Raises:
          ProcessLost: a follower has ended. A program in which it takes part may never end.
        """
        leaves = jax.tree.leaves(arrays)
        while not all(array.is_ready() for array in leaves):
            self.require_all()
            time.sleep(_GLANCE)

    def wait_for_followers(self):
        """Wait until all followers have executed every message so far.

        Raises:
          ProcessLost: one of them has ended.
        """
        with self._answered:
            expected = self._answers + len(self._sockets)
            self.broadcast("acknowledge")
            self._answered.wait_for(lambda: self._lost or self._answers >= expected)
        self.require_all()

    def close(self):
        """End the followers' ``LLM.follow``."""
        self._closed = True
        with contextlib.suppress(ProcessLost):
            self.broadcast(*_END)
        for resource in (*self._files, *self._sockets):
            with contextlib.suppress(OSError):
                resource.close()

    def _watch(self):
        """Count the followers' answers, until one of them ends its connection."""
        poll, joined = select.poll(), {}
        for connection, name in zip(self._sockets, self._names, strict=True):
            joined[connection.fileno()] = connection, name
            poll.register(connection, select.POLLIN)
        while not self._closed:
            for descriptor, _ in poll.poll(_TICK * 1000):
                (connection, name), data = joined[descriptor], b""
                with contextlib.suppress(OSError):
                    data = connection.recv(64)
                with self._answered:
                    self._answers += len(data)
                    self._lost = self._lost or (None if data else name)
                    self._answered.notify_all()
                if not data:
                    if not self._closed:
                        _notify(f"{name} was lost")
                    return


class Follower:
    """A process that executes the leader's messages. After ``when_lost``, a thread watches the connection.

    Raises:
      ProcessLost: process 0 cannot be reached.
    """

    def __init__(self):
        data = _from_process_0(b"")
        token, (name, address, port) = data[:_TOKEN_BYTES], data[_TOKEN_BYTES:].rstrip(b"\0").decode().split(" ")
        address = "127.0.0.1" if name == socket.gethostname() else address
        try:
            self._socket = socket.create_connection((address, int(port)), PATIENCE)
        except OSError as error:
            raise ProcessLost(
                f"process 0 on {name} cannot be reached at {address}:{port} ({error}): set {ADDRESS} there to an address "
                "that other hosts can reach"
            ) from error
        self._socket.settimeout(None)
        self._socket.sendall(token + jax.process_index().to_bytes(_PLACE_BYTES))
        self._ended = False
        if _when_lost is not None:
            threading.Thread(target=self._watch, name="jspec.Follower.watch", daemon=True).start()

    def __iter__(self) -> Iterator[tuple]:
        """The messages of process 0, until it ends this.

        Raises:
          ProcessLost: process 0 has ended without a message.
        """
        with self._socket, self._socket.makefile("rb") as file:
            while True:
                try:
                    message = pickle.load(file)  # from process 0, whose address came from the group itself
                except (OSError, EOFError, pickle.UnpicklingError) as error:  # the last for half a message
                    raise ProcessLost("process 0, which this one follows, was lost") from error
                if message == _END:
                    self._ended = True
                    return
                yield message

    def answer(self):
        """Tell process 0 that every message so far is done."""
        with contextlib.suppress(OSError):  # it was lost, which the next read reports
            self._socket.sendall(b".")

    def _watch(self):
        """Wait until process 0 ends the connection.

        Another thread still reads the messages before that, which may take a moment; that thread may also wait forever, for
        a program that process 0 took part in.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        while not self._ended:
            if not poll.poll(_TICK * 1000):
                continue
            time.sleep(LAST_WORDS)
            if not self._ended:
                _notify("process 0, which this one follows, was lost")
            return


def group_of(mesh: Mesh) -> "Leader | Follower | None":
    """What this process is to the others that have devices of a mesh; None if all are its own. All of them have to ask."""
    if not mesh.is_multi_process:
        return None
    if jax.process_index():
        return Follower()
    leader = Leader()
    atexit.register(leader.close)  # JAX's own end waits for the others, which wait for this
    return leader


def require_leading(group: "Leader | Follower | None"):
    """Raise a RuntimeError in a process that follows another."""
    if isinstance(group, Follower):
        raise RuntimeError(
            f"process {jax.process_index()} of {jax.process_count()} follows process 0, which takes the requests: call "
            "llm.follow() here"
        )


def fewest(number: int) -> int:
    """The smallest of the numbers that all processes ask with; the number itself if there is only one."""
    if jax.process_count() == 1:
        return number
    return int(np.min(multihost_utils.process_allgather(np.array(number))))


def _loss_of(name: str) -> ProcessLost:
    return ProcessLost(f"{name} was lost: end all processes, and start them again")


def _notify(why: str):
    if _when_lost is not None:
        _when_lost(why)


def _from_process_0(data: bytes) -> bytes:
    """The data of process 0, in all processes."""
    padded = np.zeros(_TOKEN_BYTES + _ADDRESS_BYTES, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8).tobytes()


def _own_address(host: str) -> str:
    """The address at which other hosts reach this one."""
    with contextlib.suppress(OSError):
        return os.environ.get(ADDRESS) or socket.gethostbyname(host)
    return "127.0.0.1"


def _accepted(server: socket.socket, token: bytes) -> tuple[socket.socket, str]:
    """A connection of a process that knows the token, and the name of the process; others are closed."""
    while True:
        try:
            connection, (address, *_) = server.accept()
        except TimeoutError as error:
            raise ProcessLost(
                f"not all of {jax.process_count()} processes came within {PATIENCE:.0f} seconds: each of them has to make "
                "the same calls of jspec.load()"
            ) from error
        connection.settimeout(PATIENCE)
        with contextlib.suppress(OSError):
            if secrets.compare_digest(_received(connection, len(token)), token):
                place = int.from_bytes(_received(connection, _PLACE_BYTES))
                connection.settimeout(None)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return connection, f"process {place} of {jax.process_count()}, at {address},"
        connection.close()


def _received(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := connection.recv(size - len(data))):
        data += more
    return data
