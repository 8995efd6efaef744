"""Says how far the warm-up of a model is, which takes minutes where programs are compiled."""

import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jspec.llm import LLM

SECONDS = 10.0  # between two lines


def warm_up(llm: "LLM", command: str):
    """``llm.warmup()``, about which standard error gets a line at once and now and then, and one when all programs have run.

    Args:
      llm: the model.
      command: what the lines begin with, ``jspec serve`` for example.
    """
    started, ended = time.monotonic(), threading.Event()

    def tell():
        stage, seconds = llm.engine.runner.progress, time.monotonic() - started
        print(f"{command}: {stage} after {seconds:.0f} s", file=sys.stderr, flush=True)

    def keep_telling():
        while not ended.wait(SECONDS):
            tell()

    print(f"{command}: compiling", file=sys.stderr, flush=True)
    thread = threading.Thread(target=keep_telling, name="jspec.warm_up", daemon=True)
    thread.start()
    try:
        llm.warmup()
    finally:
        ended.set()
        thread.join()
    tell()
