"""Code that was not written here ends when it has used its CPU time, and leaves the thread as it was."""

import contextlib
import threading
import time

import jinja2.sandbox
import pytest
from openai_server import family

from jspec.text import chat_template, deadline
from jspec.text.deadline import TooSlow, limited

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def forever():
    while True:
        try:
            while True:
                pass
        except Exception:
            pass


def test_the_result_is_that_of_the_code():
    assert limited(lambda: 5, 10) == 5
    with pytest.raises(KeyError, match="a"):
        limited(lambda: {}["a"], 10)


def test_endless_code_ends_and_nothing_is_raised_later():
    for _ in range(3):
        started = time.thread_time()
        with pytest.raises(TooSlow, match=r"took more than 0.1 s of CPU time"):
            limited(forever, 0.1)
        assert time.thread_time() - started < 1
        for _ in range(1000):
            time.sleep(0)


def test_waiting_takes_no_cpu_time():
    assert limited(lambda: time.sleep(0.4) or 7, 0.2) == 7


def test_the_last_moment_is_either_in_time_or_too_slow():
    """Code that ends just when its time is over gives its result or ``TooSlow``, and never an exception behind it."""

    def busy(seconds):
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass
        return "done"

    for i in range(40):
        with contextlib.suppress(TooSlow):
            assert limited(lambda i=i: busy(0.019 + 0.0001 * i), 0.02) == "done"
        time.sleep(0)
    assert not [thread for thread in threading.enumerate() if thread.name == "jspec-deadline" and not thread.daemon]


def test_a_call_that_was_left_without_stopping_its_watch_ends_nothing_later(monkeypatch):
    """As an interrupt may leave it, between the code and ``stop``."""
    watches = []
    monkeypatch.setattr(deadline._Watch, "stop", lambda watch: watches.append(watch))
    assert limited(lambda: 5, 0.05) == 5
    end = time.thread_time() + 0.3
    while time.thread_time() < end:
        pass
    watches[0].join(10)
    assert (watches[0].is_alive(), watches[0].raised) == (False, False)


def test_each_thread_has_its_own_time():
    results = []

    def run():
        with pytest.raises(TooSlow):
            limited(forever, 0.2)
        results.append(True)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert limited(lambda: sum(i for i in range(10_000)), 5) == 49_995_000
    for thread in threads:
        thread.join(20)
    assert results == [True] * 3


@pytest.mark.parametrize("role", ["user", "developer"])
def test_a_chat_template_that_never_ends(monkeypatch, role):
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.2)
    messages = [{"role": role, "content": "a"}, {"role": "user", "content": "b"}]
    llm, started = family(), time.thread_time()
    with pytest.raises(
        ValueError, match=r"messages: the chat template took more than 0.2 s of CPU time; expected another"
    ):
        llm.chat_prompt(messages, chat_template=ENDLESS)
    assert time.thread_time() - started < 1.5


def test_jinja_itself_ends_it(monkeypatch):
    """A template alone, without transformers: its loops are Python's."""
    template = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(ENDLESS)
    with pytest.raises(TooSlow):
        limited(template.render, 0.1)
