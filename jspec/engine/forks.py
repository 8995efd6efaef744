"""Refuses to work in a process that was forked from one with a model, where it would wait for ever."""

import os

_process: int | None = None  # the process that has a model


def remember_process():
    """Remember that this process has a model."""
    global _process
    _process = os.getpid()


def require_not_forked():
    """Check that this process was not forked from one that has a model: XLA's threads stay behind, and it waits for them.

    Raises:
      RuntimeError: it was.
    """
    if _process not in (None, os.getpid()):
        raise RuntimeError(
            "this process was forked from one that has loaded a model, and XLA does not work in it: start it by "
            "multiprocessing's method 'spawn' or 'forkserver', or as a program of its own, and load the model there"
        )
