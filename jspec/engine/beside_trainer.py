"""What a model can do beside a trainer in the same process: stand still, leave the device for a while, and close."""

from typing import Any, Self

from jspec._validation import is_int, require
from jspec.engine.engine import Engine
from jspec.models.flatten import without_arrays


class BesideTrainer:
    """Methods of ``jspec.LLM`` for a trainer that shares its process and its devices. Any thread may call them.

    Attributes:
      target, engine: those of the LLM.

    Example::

        with jspec.load("path/to/target") as llm:
            llm.pause("keep")  # requests of other threads stand still
            llm.resume()
            llm.sleep()  # the device's memory is the trainer's
            llm.wake_up()
    """

    target: Any
    engine: Engine

    def pause(self, mode: str = "wait"):
        """Have the engine stand still. When this returns, no step is on the device, and requests that come wait.

        In an engine that is paused, the new mode counts. Ctrl-C while this waits takes the pause back. Callers whose
        requests wait can leave at any time. ``warmup`` and ``engine.replace_draft`` may be called meanwhile, unless requests
        are kept.

        Args:
          mode: what becomes of the requests under way, which have begun. ``wait`` finishes them first. ``abort`` ends them,
            and those that wait, with the text so far and ``finish_reason="abort"``. ``keep`` has them stand still with their
            keys and values: after ``resume`` they have the same tokens as if nothing had happened.

        Raises:
          ValueError: there is no such mode.
          RuntimeError: the model is asleep or closed, or somebody else resumed before the requests had ended.
        """
        self.engine.pause(mode)

    def resume(self):
        """Have the engine go on after ``pause``; does nothing if it was not paused.

        Raises:
          RuntimeError: the model is asleep or closed.
        """
        self.engine.resume()

    @property
    def is_paused(self) -> bool:
        """Whether requests that come wait: for ``resume``, or for ``wake_up``."""
        return self.engine.is_paused

    def reset_prefix_cache(self) -> bool:
        """Forget all cached pages of the KV cache and snapshots of recurrent states. Requests under way keep their pages,
        which no other request finds any more.

        Returns:
          True: unlike vLLM's, it never fails because of requests under way.

        Raises:
          RuntimeError: the model is asleep or closed.
        """
        return self.engine.lifecycle.reset_prefix_cache()

    def sleep(self, level: int = 1):
        """Free the memory of weights, KV cache and all other state on the device.

        It waits for requests under way. Those that wait, wait for ``wake_up``; until then calls that need the device are
        refused. Compiled programs stay. Parameters of ``target`` are NumPy arrays meanwhile. Arrays to which the caller has
        references of its own stay on the device.

        The same process can use the memory at once, a trainer in JAX for example. Another process gets none of it by
        default, because XLA's allocator takes three quarters of a GPU's memory and keeps them. Under the environment
        variable ``XLA_PYTHON_CLIENT_ALLOCATOR=platform`` all memory goes back at once, but allocations take longer; under
        ``XLA_PYTHON_CLIENT_PREALLOCATE=false`` the allocator takes only what is needed, but keeps that.

        Args:
          level: 1 copies the weights to host memory, and ``wake_up`` brings back the same bits. 2 copies those of the draft
            alone and drops the target's: behind ``wake_up``, calls raise a RuntimeError that says ``weights incomplete``
            until ``update_weights`` has given all of them, or ``restore``.

        Raises:
          ValueError: another level.
          RuntimeError: requests stand still after ``pause("keep")``; the model is closed; or its devices belong to several
            processes.
          MemoryError: the host has no room for the weights. The model is awake then.
        """
        require(is_int(level) and level in (1, 2), "level", level, "1 or 2")
        self.engine.lifecycle.sleep(drops=level == 2)

    def wake_up(self):
        """Put the weights back after ``sleep``, the same bits on the same devices, and go on with an empty cache. Nothing is
        compiled again. An engine that was paused before it slept is paused still. Does nothing if the model is awake.

        Raises:
          RuntimeError: the model is closed; or what JAX raises if a device has no room, and then the model still sleeps.
        """
        self.engine.lifecycle.wake_up()

    @property
    def is_sleeping(self) -> bool:
        """Whether weights and KV cache are off the device."""
        return self.engine.lifecycle.is_sleeping

    def close(self):
        """End the engine for good, and free its memory on its devices, although the caller still has this object.

        Requests of all threads end with ``finish_reason="abort"``, and the engine's thread ends. ``target`` has shapes in
        place of arrays then. Later calls raise a RuntimeError, but for this one, which does nothing.

        Raises:
          RuntimeError: a callback of the engine's own thread is the caller.
        """
        self.engine.lifecycle.close()
        self.target = without_arrays(self.target)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_):
        self.close()
