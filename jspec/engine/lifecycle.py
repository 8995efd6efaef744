"""Pauses an engine, lets it sleep and closes it, for the threads of callers."""

import contextlib
from collections.abc import Callable

import jax

from jspec._validation import is_one_of, require
from jspec.engine.handle import EngineHandle
from jspec.engine.loop import Loop
from jspec.engine.pausing import ASLEEP, CLOSED, Pausing
from jspec.engine.runner.sleeping import Sleeper

MODES = ("wait", "abort", "keep")


class Lifecycle:
    """What callers do to an engine beside a trainer: they pause it, let it sleep, and close it, from any thread.

    Args:
      handle: how the engine's thread is reached.
      loop: what the thread steps.
      pausing: what it looks at.
      abort_all: ends all requests; for the thread.
      sleeper: takes weights off the device.
    """

    def __init__(
        self, handle: EngineHandle, loop: Loop, pausing: Pausing, abort_all: Callable[[], None], sleeper: Sleeper
    ):
        self._handle, self._loop, self._pausing = handle, loop, pausing
        self._abort_all, self._sleeper = abort_all, sleeper
        self._resumes = False  # whether waking up ends the pause, which only sleep has begun

    @property
    def is_paused(self) -> bool:
        """As ``BesideTrainer.is_paused``."""
        return self._pausing.mode is not None

    @property
    def is_sleeping(self) -> bool:
        """As ``BesideTrainer.is_sleeping``."""
        return self._pausing.refuses == ASLEEP

    def pause(self, mode: str):
        """As ``BesideTrainer.pause``."""
        require(is_one_of(mode, MODES), "mode", mode, "'wait', 'abort' or 'keep'")
        self._pause(mode, self._settle)

    def resume(self):
        """As ``BesideTrainer.resume``."""
        self._handle.running().call(self._pausing.resume)

    def sleep(self, drops: bool):
        """As ``BesideTrainer.sleep``, of level 2 if it ``drops`` the target's weights."""
        if self.is_sleeping:
            return
        if self._loop.runner.batch.group is not None:
            raise RuntimeError("sleep() is not available where the target's devices belong to several processes")
        if self.is_paused:
            self._handle.running().call(lambda: self._fall_asleep(drops, resumes=False), idle=True)
        else:
            self._pause("wait", lambda: self._fall_asleep(drops, resumes=True))

    def wake_up(self):
        """As ``BesideTrainer.wake_up``."""
        if self.is_sleeping:
            self._handle.running(always=True).call(self._wake_up, always=True)
        else:
            self._pausing.require_usable()

    def reset_prefix_cache(self) -> bool:
        """As ``BesideTrainer.reset_prefix_cache``."""
        self._handle.running().call(self._loop.scheduler.pages.forget_prefixes)
        return True

    def close(self):
        """As ``BesideTrainer.close``."""
        self._handle.close(CLOSED, self._abort_all)
        self._loop.leave_device()
        self._sleeper.free()

    def _pause(self, mode: str, then: Callable[[], None]):
        """Pause, and have the engine's thread call ``then`` when nothing is under way, or at once where it is kept. A caller
        that is interrupted meanwhile leaves the engine as it was."""
        thread, by = self._handle.running(), object()
        try:
            thread.call(lambda: self._begin(mode, by))
            thread.call(then, idle=mode == "wait")
        except BaseException:
            self._handle.post(lambda: self._pausing.take_back(by))
            raise

    # What follows is for the engine's thread.

    def _begin(self, mode: str, by: object):
        self._pausing.pause("keep" if mode == "keep" else "wait", by)
        if mode == "abort":
            self._abort_all()

    def _settle(self):
        """Wait for the device. Calls whose logs were not read stay so: they are read in the first step after the pause.

        Raises:
          RuntimeError: somebody else has resumed meanwhile.
        """
        if not self.is_paused:
            raise RuntimeError("resume() was called while pause() waited for requests under way: the engine goes on")
        with contextlib.suppress(RuntimeError):  # of a device that failed, which the next step finds
            jax.block_until_ready(self._loop.runner.batch.state)

    def _fall_asleep(self, drops: bool, resumes: bool):
        self._settle()
        self._sleeper.fall_asleep(drops)
        if drops:
            self._loop.incomplete = "sleep(level=2) dropped them"
        self._loop.leave_device()
        self._resumes, self._pausing.refuses = resumes, ASLEEP

    def _wake_up(self):
        if self.is_sleeping:  # another caller may have been first
            self._sleeper.wake_up()
            self._pausing.refuses = None
            if self._resumes:
                self._pausing.resume()
