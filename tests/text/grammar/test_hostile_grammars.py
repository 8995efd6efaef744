"""Grammars that harm the process which compiles them harm no other, and what was refused once is refused at once."""

import concurrent.futures
import contextlib
import gc
import json
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from benchmarks.soak.hostile_grammars import ENDLESS, HOSTILE
from jspec import StructuredOutputsParams
from jspec.checkpoints.tokenizer import load_tokenizer
from jspec.commands.demo import FAMILY
from jspec.text.grammar import grammars as grammars_module
from jspec.text.grammar import limits as limits_module
from jspec.text.grammar.grammars import Grammars
from jspec.text.grammar.limits import GrammarLimits, check_size
from jspec.text.grammar.process import GrammarBusy

EOS, V = 0, 2048
PATIENCE = 30  # seconds
GOOD = StructuredOutputsParams(regex="[0-9]{3}")
ENDLESS_ONE, ENDLESS_TWO, ENDLESS_THREE = (StructuredOutputsParams(**form) for form in ENDLESS[:3])


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(load_tokenizer(FAMILY / "target"), V, [EOS])
    made.start()
    yield made
    made.close()


def worker(grammars: Grammars) -> psutil.Process:
    """The process that forks others to try grammars."""
    return psutil.Process(grammars._process._process.pid)


def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_hostile_grammar_is_refused_and_the_refusal_is_cached(grammars, monkeypatch):
    refused = {}
    for name, (form, message) in HOSTILE.items():
        asked = StructuredOutputsParams(**form)
        with pytest.raises(ValueError, match=r"structured_outputs has no usable grammar: ") as error:
            grammars.constraint(asked, [EOS])
        assert message in str(error.value), name
        refused[asked] = str(error.value)
    monkeypatch.setattr(grammars._process, "try_out", None)  # nothing is tried again
    for asked, why in refused.items():
        with pytest.raises(ValueError, match=re.escape(why)):
            grammars.constraint(asked, [EOS])


def test_child_is_killed_at_its_limits_without_static_checks(grammars, monkeypatch):
    """The same grammars, and some for which the glance has no limit, overflow the stack or exceed memory or time."""
    for name in ("MAX_DEPTH", "MAX_REFERENCES", "MAX_RULES", "MAX_PATTERNS"):
        monkeypatch.setattr(limits_module, name, 10**6)
    grammars.limits = GrammarLimits(seconds=1.0)
    rules = 60_000
    chain = "".join(f"r{i}: r{i + 1}\n" for i in range(rules))
    deep = StructuredOutputsParams(grammar=f'start: r0\n{chain}r{rules}: "a"\n')
    with pytest.raises(ValueError, match="refer to each other too deeply: compiling it takes more than 48 MB of stack"):
        grammars.constraint(deep, [EOS])
    with pytest.raises(ValueError, match="takes more than 1 CPU seconds"):
        grammars.constraint(ENDLESS_ONE, [EOS])
    grammars.limits = GrammarLimits(seconds=60.0, memory=32 * 2**20)
    with pytest.raises(ValueError, match="takes more than 32 MB of memory"):
        grammars.constraint(ENDLESS_TWO, [EOS])
    assert grammars.constraint(GOOD, [EOS]).jump_forward(1) == []


def test_cpu_time_is_the_limit_on_a_busy_machine(grammars):
    """A worker that is stopped for a while, as by a busy machine, makes no refusal: the grammar is compiled afterwards."""
    grammars.limits = GrammarLimits(seconds=0.5)
    process = worker(grammars)
    process.suspend()
    compilation = grammars.compile(GOOD)
    with pytest.raises(concurrent.futures.TimeoutError):
        compilation.result(1.5)
    process.resume()
    assert compilation.result(PATIENCE).constraint(V, [EOS]).jump_forward(1) == []


def test_grammar_without_a_free_child_may_be_retried(grammars):
    grammars.limits = GrammarLimits(seconds=60.0, wait=0.2)
    endless = [grammars.compile(ENDLESS_ONE), grammars.compile(ENDLESS_TWO)]
    until(lambda: len(worker(grammars).children()) == 2)
    with pytest.raises(GrammarBusy, match="try again later"):
        grammars.constraint(GOOD, [EOS])
    for compilation in endless:
        compilation.cancel()
    grammars.constraint(GOOD, [EOS])


def test_equal_grammars_are_compiled_once_for_all_waiting_requests(grammars, monkeypatch):
    tried, try_out = [], grammars._process.try_out
    monkeypatch.setattr(grammars._process, "try_out", lambda *given: tried.append(given) or try_out(*given))
    process = worker(grammars)
    process.suspend()
    compilations = [grammars.compile(GOOD) for _ in range(3)]
    compilations[0].cancel()  # the others still wait
    process.resume()
    first, second = (compilation.result(PATIENCE) for compilation in compilations[1:])
    assert (first is second, len(tried)) == (True, 1)
    assert grammars.compile(GOOD).result(0) is first


def test_cached_grammars_have_a_memory_budget(grammars, monkeypatch):
    """The oldest go first, but for those that somebody holds; what was measured of them is what they took in the child."""
    forms = [StructuredOutputsParams(choice=[letter * 20_000]) for letter in "abc"]
    held = grammars.compile(forms[0]).result(PATIENCE)
    assert 2**20 < held.num_bytes < 64 * 2**20
    monkeypatch.setattr(grammars_module, "CACHED_BYTES", int(1.5 * held.num_bytes))
    for form in forms[1:]:
        grammars.constraint(form, [EOS])
    assert [*grammars._newest] == [forms[2]]
    gc.collect()
    assert {*grammars._in_use} == {forms[0], forms[2]}
    assert grammars.compile(forms[0]).result(0) is held
    monkeypatch.setattr(grammars_module, "CACHED_GRAMMARS", 1)
    grammars.constraint(GOOD, [EOS])
    assert [*grammars._newest] == [GOOD]


def test_trial_is_cancelled_when_its_client_is_gone(grammars):
    grammars.limits = GrammarLimits(seconds=60.0)
    both = [grammars.compile(ENDLESS_ONE), grammars.compile(ENDLESS_ONE)]
    until(lambda: worker(grammars).children())
    both[0].cancel()
    time.sleep(0.1)
    assert len(worker(grammars).children()) == 1
    both[1].cancel()
    until(lambda: not worker(grammars).children())
    assert not grammars._under_way


def test_interrupt_cancels_the_trial(grammars):
    grammars.limits = GrammarLimits(seconds=60.0)

    def interrupt():
        until(lambda: worker(grammars).children())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        grammars.constraint(ENDLESS_ONE, [EOS])
    until(lambda: not worker(grammars).children())
    grammars.constraint(GOOD, [EOS])


def test_lost_worker_is_restarted(grammars):
    grammars.limits = GrammarLimits(seconds=60.0)
    lost = worker(grammars)
    compilation = grammars.compile(ENDLESS_THREE)
    until(lambda: lost.children())
    (child,) = lost.children()
    lost.kill()
    assert grammars.constraint(GOOD, [EOS]).jump_forward(1) == []
    assert worker(grammars).pid != lost.pid
    until(lambda: worker(grammars).children())  # what was tried when it was lost is tried again
    compilation.cancel()
    child.kill()


def test_killed_child_does_not_refuse_the_grammar(grammars):
    """The kernel kills processes where memory is short, whosever fault that is."""
    grammars.limits = GrammarLimits(seconds=60.0)
    compilation = grammars.compile(ENDLESS_ONE)
    until(lambda: worker(grammars).children())
    worker(grammars).children()[0].kill()
    with pytest.raises(GrammarBusy, match="try again later"):
        compilation.result(PATIENCE)
    assert not grammars._refused


def test_worker_ends_with_its_object():
    made = Grammars(load_tokenizer(FAMILY / "target"), V, [EOS])
    made.constraint(GOOD, [EOS])
    process = worker(made)
    del made
    gc.collect()
    until(lambda: not process.is_running())


def test_forced_text_is_walked_once_by_the_compiling_thread(grammars):
    """A text of 60,000 characters that has to come is walked through once, by the thread that compiles, and what follows
    costs about what it does for a short one (without that, 200 times as much)."""
    long, short = (
        grammars.constraint(StructuredOutputsParams(grammar=f'start: "{"ab" * length}"'), [EOS])
        for length in (30_000, 300)
    )

    def cost(constraint) -> float:
        flags = np.full((5, V // 32), 2**32 - 1, np.uint32)
        started = time.thread_time()
        for _ in range(20):
            drafts = constraint.jump_forward(4)
            constraint.allow(drafts, flags)
            constraint.add(drafts)
        return time.thread_time() - started

    assert cost(long) < 8 * cost(short)


def test_long_texts_have_the_tokens_that_llguidance_finds(grammars):
    """``_forced_tokens`` tells the beginning of what llguidance tells of the whole, wherever in the text it is asked."""
    rng = np.random.default_rng(0)
    vocabulary = [grammars._tokenizer.decode([token], skip_special_tokens=False) for token in range(V)]
    words = [word for word in vocabulary if word.isprintable() and word.isascii() and not set(word) & set('"\\<')]
    text = "".join(rng.choice(words, 1000))
    constraint = grammars.constraint(StructuredOutputsParams(choice=[text]), [EOS])
    flags, matcher, places = np.zeros((1, V // 32), np.uint32), constraint._matcher, 0
    while found := constraint._forced_tokens():
        theirs = matcher.compute_ff_tokens()
        assert theirs[: len(found)] == found
        flags[:] = 2**32 - 1
        constraint.allow([], flags)
        assert theirs[: len(constraint._ahead)] == [*constraint._ahead]
        assert np.flatnonzero(np.unpackbits(flags.view(np.uint8), bitorder="little")).tolist() == found[:1]
        np.testing.assert_array_equal(flags[0], np.frombuffer(matcher.compute_bitmask(), np.uint32)[: V // 32])
        # Not always as the tokenizer splits it: any token that begins the rest may be drawn at a high temperature.
        rest = matcher.compute_ff_bytes().decode()
        other = [token for token, word in enumerate(vocabulary) if word and rest.startswith(word) and token != EOS]
        constraint._consume(found[0] if places % 3 else int(rng.choice(other)))
        places += 1
    assert places > 100


def test_a_text_that_spells_a_special_token(grammars):
    """It is letters, as everything that a grammar says; the special token has no text, and would end the request."""
    text = 'print("<|endoftext|>")'
    constraint, written = grammars.constraint(StructuredOutputsParams(choice=[text]), [EOS]), []
    while not constraint._ended:
        flags = np.full((3, V // 32), 2**32 - 1, np.uint32)
        drafts = constraint.jump_forward(2)
        constraint.allow(drafts, flags)
        for place, draft in enumerate(drafts):
            allowed = np.flatnonzero(np.unpackbits(flags[place].view(np.uint8), bitorder="little"))
            assert allowed.tolist() == [draft]
        written += drafts
        constraint.add(drafts)
    assert grammars._tokens.decode_str(written[:-1]) == text
    assert written[-1] == EOS


def test_limits_name_field_and_value():
    with pytest.raises(ValueError, match=r"seconds=0: expected a number above 0"):
        GrammarLimits(seconds=0)
    with pytest.raises(ValueError, match=r"wait=-1: expected a number above 0"):
        GrammarLimits(wait=-1)


def test_usual_grammars_pass_the_static_checks():
    defs = {f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(200)}
    fields = {f"f{i}": {"type": "string", "pattern": f"^[a-z]{{{i}}}$"} for i in range(100)}
    schema = {"$defs": {**defs, "d200": {}}, "type": "object", "properties": {**fields, "d": {"$ref": "#/$defs/d0"}}}
    check_size(StructuredOutputsParams(json=json.dumps(schema)))
    rules = "".join(f'r{i}.{i}: "(" r{i + 1} ")" | /[a-z:(]+/ // r: a comment\n' for i in range(250))
    check_size(StructuredOutputsParams(grammar=f'start: r0\n{rules}r250: "["'))


UNITS = [
    "a",
    "a ",
    '"',
    '\\"',
    '"\\"',
    "/",
    "\\/",
    "/a",
    "(",
    "a:",
    "a\n",
    ":",
    "|",
    "?a",
    "[",
    "\\",
    "//",
    "i/x",
    '"/',
    "\t",
]


@pytest.mark.parametrize("unit", UNITS)
def test_static_checks_take_linear_time(unit):
    """It runs on the event loop of a server. Any of these texts took seconds if a pattern went back over it."""
    grammar = StructuredOutputsParams(grammar="start: " + unit * (2**18 // len(unit)))
    started = time.thread_time()
    with contextlib.suppress(ValueError):
        check_size(grammar)
    assert time.thread_time() - started < 0.5


def test_deep_schema_is_refused_at_any_stack_depth(grammars):
    """However deep the stack is already on which it is looked at, it is a refusal and no other error."""

    def refused(frames: int, depth: int) -> bool:
        if frames:
            return refused(frames - 1, depth)
        try:
            grammars.constraint(StructuredOutputsParams(json='{"items":' * depth + "{}" + "}" * depth), [EOS])
        except ValueError:
            return True
        return False

    assert all(refused(frames, depth) for frames in (0, 40, 300) for depth in range(500, 1200, 7))


def test_threads_that_compile_have_more_stack_than_the_child():
    assert grammars_module.MORE_STACK > grammars_module.STACK
    assert threading.stack_size() == 0  # of all other threads, as ever
    assert (
        resource.getrlimit(resource.RLIMIT_CPU)[0] == resource.RLIM_INFINITY
    )  # nothing of a child's limits stays here
