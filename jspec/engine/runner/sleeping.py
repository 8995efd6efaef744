"""Weights and state that leave the device for a while, and come back in the same bits."""

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jspec.engine.runner.device_batch import DeviceBatch


class Sleeper:
    """Takes the arrays of a batch off the device and puts them back, in the engine's thread, or when that has ended.

    Modules that hold the same arrays as the batch hold the copies meanwhile. Arrays that a caller holds by itself stay on
    the device, because they may be those of a trainer.

    Args:
      batch: has weights and state.
      models: target and draft model, to which it keeps no reference.
    """

    def __init__(self, batch: DeviceBatch, models: Sequence[Any]):
        self._batch = batch
        self._modules = [weakref.ref(model) for model in models if isinstance(model, nnx.Module)]
        self._shardings: dict[int, jax.sharding.Sharding] = {}  # of each array, by the id of its copy

    def fall_asleep(self, drops: bool):
        """Copy the weights to host memory, or those of the draft alone if it ``drops`` the target's, and free the device's.
        The device has to be idle.

        Raises:
          MemoryError: the host has no room for them. Nothing has changed then.
        """
        arrays = _by_id(self._batch.leaves)
        dropped = {id(leaf) for leaf in self._batch.leaves[0]} if drops else set()
        copies = {key: _nothing(array) if key in dropped else _on_host(array) for key, array in arrays.items()}
        self._shardings = {id(copies[key]): array.sharding for key, array in arrays.items()}
        self._replace(copies)
        self._batch.drop_state()

    def wake_up(self):
        """Put the weights back, and make the state of an empty batch.

        Raises:
          Exception: what JAX raises if the device has no room. Everything is as it was before then.
        """
        copies = _by_id(self._batch.leaves)
        arrays = {key: _on_device(copy, self._shardings[key]) for key, copy in copies.items()}
        self._replace(arrays)
        try:
            self._batch.reset_state()
            jax.block_until_ready((self._batch.leaves, self._batch.state))
        except Exception as error:
            self._replace({id(array): copies[key] for key, array in arrays.items()})
            self._batch.drop_state()
            error.add_note("The model is still asleep: free memory of its devices, and call wake_up() again.")
            raise

    def free(self):
        """Leave the device for good."""
        self._batch.leaves = ([], [])
        self._batch.drop_state()
        for program in self._batch.programs:
            program.unload()

    def _replace(self, new: Mapping[int, Any]):
        """Put arrays into the places of those that have these ids, in the batch and in the modules."""
        target, draft = ([new[id(leaf)] for leaf in leaves] for leaves in self._batch.leaves)
        self._batch.leaves = (target, draft)
        for module in (ref() for ref in self._modules):
            if module is not None:
                nnx.update(module, jax.tree.map(lambda leaf: new.get(id(leaf), leaf), nnx.state(module)))


def _by_id(leaves: tuple[list[Any], list[Any]]) -> dict[int, Any]:
    """Every array once: a draft head may borrow some of the target's."""
    return {id(leaf): leaf for leaf in itertools.chain(*leaves)}


def _nothing(array: jax.Array) -> np.ndarray:
    """What stands for an array that was dropped: zeros that take no memory."""
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def _on_device(copy: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    if copy.ndim and copy.size > 1 and not any(copy.strides):  # of ``_nothing``
        return jnp.zeros(copy.shape, copy.dtype, device=sharding)
    return jax.device_put(copy, sharding)


def _on_host(array: jax.Array) -> np.ndarray:
    """A copy in host memory, of one shard if all are the same."""
    copy = np.asarray(array)
    return copy if copy.flags.owndata else copy.copy()  # on a CPU it is the device's own memory
