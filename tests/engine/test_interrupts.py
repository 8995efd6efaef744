"""Ctrl-C is held off, and not lost."""

import signal
import threading

import pytest

from jspec.engine.interrupts import uninterrupted


@pytest.fixture(autouse=True)
def handler_is_put_back():
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def press(events: list):
    signal.raise_signal(signal.SIGINT)
    events.append("pressed")
    return 7


def test_it_comes_after_the_call():
    events = []
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(press, events)
    assert events == ["pressed"]


def test_without_one_nothing_happens():
    assert uninterrupted(max, 2, 3) == 3
    with pytest.raises(ZeroDivisionError):
        uninterrupted(divmod, 1, 0)


def test_it_is_not_lost_where_the_call_fails():
    def fail():
        press([])
        raise ZeroDivisionError

    with pytest.raises(KeyboardInterrupt):
        uninterrupted(fail)


def test_calls_may_be_nested():
    events = []

    def twice():
        uninterrupted(press, events)
        return press(events)

    with pytest.raises(KeyboardInterrupt):
        uninterrupted(twice)
    assert events == ["pressed"] * 2


def test_a_handler_of_the_users_own_is_called_afterwards():
    events = []
    before = signal.signal(signal.SIGINT, lambda *_: events.append("handler"))
    try:
        assert uninterrupted(press, events) == 7
    finally:
        signal.signal(signal.SIGINT, before)
    assert events == ["pressed", "handler"]


def test_ignored_interrupts_stay_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert uninterrupted(press, []) == 7
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_are_left_alone():
    handlers = []
    what = lambda: handlers.append(signal.getsignal(signal.SIGINT))  # noqa: E731
    thread = threading.Thread(target=uninterrupted, args=(what,))
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
