"""One of the processes of test_processes.py: it loads, and generates or follows. Process 0 prints what came of it as JSON.

    python one_process.py ADDRESS COUNT PLACE WHAT

WHAT is JSON: the arguments of ``jspec.load``, prompts, and options of several calls of ``jspec.generate``."""

import itertools
import json
import os
import signal
import sys
import time
from typing import Any

import jax

address, count, place, what = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
jax.distributed.initialize(address, num_processes=count, process_id=place)

import jspec  # noqa: E402  # JAX has to know of the others before anything runs
from jspec.engine.runner.follower import FollowerRunner  # noqa: E402


def die_after(most: int):
    """Have a process that follows killed after so many programs."""
    send, sent = FollowerRunner.send, itertools.count()

    def send_some(self, *told):
        if next(sent) == most:
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, *told)

    FollowerRunner.send = send_some


def outcome(llm, options) -> list:
    results: Any = jspec.generate(llm, what["prompts"], **options)
    return [(one.token_ids, one.stats.num_accepted_draft_tokens) for one in results]


if place and "dies_after" in what:
    die_after(what["dies_after"])
llm = jspec.load(**what["load"])
if what.get("warmup") and not place:
    llm.warmup()
if place:
    try:
        jspec.generate(llm, "x")
    except RuntimeError as error:
        print(error)
    llm.follow()
else:
    began = time.perf_counter()
    try:
        outcomes = [outcome(llm, options) for options in what["options"]]
    except Exception as error:
        print(json.dumps({"error": str(error), "seconds": time.perf_counter() - began}), flush=True)
        os._exit(1)  # JAX would wait for the process that was lost
    print(json.dumps({"outcomes": outcomes, "preemptions": llm.engine.metrics().num_preemptions}))
