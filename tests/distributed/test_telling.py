"""What one process tells another, and what becomes of either when the other is not there."""

import pickle
import queue
import re
import socket
import threading
import time

import jax
import numpy as np
import pytest

from jspec.engine.multihost import leader as leader_module
from jspec.engine.multihost.leader import Follower, Leader, ProcessLost

LOST = r"process 1 of 2, at 127\.0\.0\.1, was lost"


@pytest.fixture
def group(monkeypatch):
    """JAX of two processes, which are two threads here: what process 0 says at the start, the other one gets."""
    said: queue.Queue[bytes] = queue.Queue()

    def from_process_0(data: bytes) -> bytes:
        if not data:
            return said.get(timeout=60)
        said.put(data)
        return data

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(leader_module, "_from_process_0", from_process_0)
    return said


@pytest.fixture
def joined(group):
    """Leader and follower, connected."""
    made: queue.Queue[Leader] = queue.Queue()
    thread = threading.Thread(target=lambda: made.put(Leader()))
    thread.start()
    follower = Follower()
    thread.join()
    leader = made.get()
    yield leader, follower
    leader.close()
    follower._socket.close()


def test_messages_come_in_order_and_end(joined):
    leader, follower = joined
    for i in range(3):
        leader.broadcast("send", i, [np.arange(i)])
    leader.close()
    told = list(follower)
    assert [(what, place) for what, place, _ in told] == [("send", 0), ("send", 1), ("send", 2)]
    np.testing.assert_array_equal(told[2][2][0], np.arange(2))


def test_silent_end_of_the_leader_is_noticed(joined):
    leader, follower = joined
    leader._files[0].write(b"half of a")
    for one in (*leader._files, *leader._sockets):
        one.close()
    with pytest.raises(ProcessLost, match="process 0, which this one follows, was lost"):
        list(follower)


def test_end_of_a_follower_is_noticed(joined):
    leader, follower = joined
    follower._socket.close()
    with pytest.raises(ProcessLost, match=LOST):
        leader.broadcast("send", 0, [np.zeros(10_000_000)])  # more than connections hold on the way


def test_unauthenticated_connections_are_refused(group, monkeypatch):
    monkeypatch.setattr(leader_module, "PATIENCE", 1.0)
    failed: queue.Queue[Exception] = queue.Queue()

    def lead():
        try:
            Leader()
        except ProcessLost as error:
            failed.put(error)

    thread = threading.Thread(target=lead)
    thread.start()
    port = int(group.get(timeout=60)[leader_module._TOKEN_BYTES :].decode().split(" ")[2])
    with socket.create_connection(("localhost", port)) as stranger:
        stranger.sendall(b"x" * leader_module._TOKEN_BYTES)
        assert stranger.recv(1) == b""
    thread.join()
    assert "not all of 2 processes came" in str(failed.get())


def test_unreachable_leader_is_reported(group):
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    group.put(b"x" * leader_module._TOKEN_BYTES + f"elsewhere 127.0.0.1 {port}".encode())
    with pytest.raises(
        ProcessLost, match=rf"process 0 on elsewhere cannot be reached at 127\.0\.0\.1:{port}.*JSPEC_HOST_IP"
    ):
        Follower()


def test_leader_waits_until_followers_have_replayed(joined):
    leader, follower = joined
    done: list[str] = []

    def follow():
        for what, *_ in follower:
            done.append(what)
            if what == "acknowledge":
                follower.answer()

    following = threading.Thread(target=follow)
    leader.broadcast("send")
    threading.Timer(0.3, following.start).start()
    for _ in range(2):
        leader.wait_for_followers()
    assert done == ["send", "acknowledge", "acknowledge"]
    leader.close()
    following.join()


@pytest.mark.parametrize("meets", [False, True])
def test_leader_notices_the_loss_of_a_follower(joined, monkeypatch, meets):
    leader, follower = joined
    noticed: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(leader_module, "_when_lost", noticed.put)
    threading.Timer(0.3 if meets else 0, follower._socket.close).start()
    if meets:
        with pytest.raises(ProcessLost, match=LOST):
            leader.wait_for_followers()
    assert re.fullmatch(LOST, noticed.get(timeout=60))
    with pytest.raises(ProcessLost, match=LOST):
        leader.broadcast("send")  # though no message has failed yet


class Never:
    """An array of a program in which a lost process takes part."""

    def is_ready(self) -> bool:
        return False


def test_leader_waits_for_no_program_of_a_lost_process(joined):
    leader, follower = joined
    leader.wait_for([jax.numpy.ones(2)])
    threading.Timer(0.3, follower._socket.close).start()
    began = time.monotonic()
    with pytest.raises(ProcessLost, match=LOST):
        leader.wait_for([Never()])
    assert time.monotonic() - began < 10


def test_follower_notices_a_loss_while_waiting_for_its_devices(group, monkeypatch):
    noticed: queue.Queue[str] = queue.Queue()
    leader_module.when_lost(noticed.put)
    monkeypatch.setattr(leader_module, "LAST_WORDS", 0.1)
    try:
        with socket.create_server(("localhost", 0)) as server:
            said = leader_module._END
            group.put(b"x" * leader_module._TOKEN_BYTES + f"elsewhere 127.0.0.1 {server.getsockname()[1]}".encode())
            follower = Follower()
            one, _ = server.accept()
            group.put(b"x" * leader_module._TOKEN_BYTES + f"elsewhere 127.0.0.1 {server.getsockname()[1]}".encode())
            ended = Follower()
            two, _ = server.accept()
        with one, two:
            two.sendall(pickle.dumps(said))
        assert list(ended) == []
        assert noticed.get(timeout=60) == "process 0, which this one follows, was lost"
        with pytest.raises(queue.Empty):
            noticed.get(timeout=2 * leader_module._TICK)  # of the one that was let go
        follower._socket.close()
    finally:
        leader_module._when_lost = None
