"""Packs several small arrays on the host into one, because every argument of a program costs a transfer of its own."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class HostPacking:
    """The layout of a pytree of arrays of four-byte numbers in one array.

    Attributes:
      structure: of the pytree.
      shapes, dtypes: of its leaves.
    """

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]

    @staticmethod
    def of(example: Any) -> "HostPacking":
        """The packing of pytrees like ``example``."""
        leaves, structure = jax.tree.flatten(example)
        arrays = [np.asarray(leaf) for leaf in leaves]
        assert all(array.dtype.itemsize == 4 for array in arrays), [array.dtype for array in arrays]
        return HostPacking(structure, tuple(array.shape for array in arrays), tuple(array.dtype for array in arrays))

    @property
    def size(self) -> int:
        """How many numbers the array has."""
        return sum(map(math.prod, self.shapes))

    def pack(self, tree: Any) -> np.ndarray:
        """The arrays of a pytree on the host, concatenated, int32 ``[size]``."""
        leaves = jax.tree.leaves(tree)
        return np.concatenate([np.ascontiguousarray(leaf).reshape(-1).view(np.int32) for leaf in leaves])

    def views(self) -> tuple[np.ndarray, Any]:
        """A new array as ``pack`` makes one, with any contents, and the pytree of its parts, to be written in place."""
        packed, leaves, start = np.empty(self.size, np.int32), [], 0
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            end = start + math.prod(shape)
            leaves.append(packed[start:end].view(dtype).reshape(shape))
            start = end
        return packed, jax.tree.unflatten(self.structure, leaves)

    def unpack(self, packed) -> Any:
        """The pytree again, inside a trace."""
        leaves, start = [], 0
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            end = start + math.prod(shape)
            leaves.append(jax.lax.bitcast_convert_type(packed[start:end].reshape(shape), jnp.dtype(dtype)))
            start = end
        return jax.tree.unflatten(self.structure, leaves)
