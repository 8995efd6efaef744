"""Generators, models and processes that end before their requests: nothing is kept, and no other request notices."""

import gc
import pathlib
import subprocess
import sys
import weakref

import jax
import pytest
from children import environment
from engines import assert_nothing_is_held, key_of, table_llm
from interruption import PARAMS, PROMPTS, TABLES, streamed, texts, warm_llm

import jspec


@pytest.fixture(scope="module")
def warm():
    return warm_llm()


def test_an_abandoned_generator(warm):
    llm, expected = warm
    keys = [key_of(seed) for seed in range(len(PROMPTS))]
    for abandon in (lambda run: run.close(), lambda run: None):  # by hand, or by losing it
        run = llm.completions(PROMPTS, PARAMS, keys)
        next(run)
        assert texts(llm) == expected
        abandon(run)
        del run
        assert_nothing_is_held(llm.engine)
        assert texts(llm) == expected


def test_a_generator_of_which_a_traceback_lives_on(warm):
    llm, expected = warm
    try:
        for _ in jspec.stream(llm, PROMPTS[0], PARAMS[0]):
            raise ZeroDivisionError
    except ZeroDivisionError as error:
        kept = error
    assert texts(llm) == expected
    assert kept.__traceback__ is not None


def test_a_model_that_is_deleted_leaves_nothing():
    llm = table_llm(TABLES[0])
    texts(llm)
    streamed(llm)
    abandoned = jspec.stream(llm, PROMPTS[0], PARAMS[0])
    next(abandoned)
    thread, state = llm.engine.handle.running(), jax.tree.leaves(llm.engine.runner.batch.state)
    kept = [weakref.ref(what) for what in (llm, llm.engine, llm.engine.runner, *state)]
    del llm, abandoned, state
    gc.collect()
    thread._thread.join(10)
    assert thread.ended
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


ABRUPT = """
import os, threading, jspec
from engines import table_llm
from interruption import PARAMS, PROMPTS, TABLES

llm = table_llm(TABLES[0])
jspec.generate(llm, PROMPTS, PARAMS)
child = os.fork()
if not child:
    for call in (lambda: jspec.generate(llm, PROMPTS, PARAMS), lambda: llm.logits([1]), lambda: jspec.load("target")):
        try:
            call()
        except RuntimeError as error:
            print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
for_ever = threading.Thread(target=lambda: jspec.generate(llm, PROMPTS * 10_000, PARAMS * 10_000), daemon=True)
for_ever.start()
stream = jspec.stream(llm, PROMPTS[0], PARAMS[0])
next(stream)
print("exits", flush=True)
"""


def test_a_process_that_forks_and_ends_before_its_requests():
    """A daemon thread inside of XLA would abort it."""
    helpers = pathlib.Path(__file__).parents[1] / "helpers"
    command = [sys.executable, "-W", "ignore", "-c", ABRUPT]
    ended = subprocess.run(command, env=environment(helpers), capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    *said, exits = ended.stdout.splitlines()
    assert len(said) == 3
    assert all("this process was forked from one that has loaded a model, and XLA does not work" in one for one in said)
    assert exits == "exits"
