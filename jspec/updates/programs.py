"""Compiled functions that write parameters into the memory of those of before, and that look for NaN."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.checkpoints.files.tensor import joined
from jspec.config import ModelConfig, Shards
from jspec.models.sharding import indices_of
from jspec.updates.named import NamedArrays
from jspec.updates.rounding import rounded


class Programs:
    """Writes parameters of a model, in programs that are compiled once for all layers of the same sizes.

    Args:
      config: that of the model.
      shards: how its arrays lie on several devices; None on one.
    """

    def __init__(self, config: ModelConfig, shards: Shards | None):
        self._config, self._shards = config, shards
        self._splits = {} if shards is None else shards.splits(config)
        self._stored = config.stored_params()
        self._compiled: dict[Any, Callable] = {}  # by what they compute
        self._known: dict[Any, Callable] = {}  # by parameter, and by the arrays that they take

    @property
    def num_compiled(self) -> int:
        return len(self._compiled)

    def names(self, param: str) -> list[str]:
        """The names of the arrays that a parameter has in the model: ``weight`` first, and its scales."""
        return [param] if param not in self._stored else list(self._stored[param].names.values())

    def writer(
        self, params: Sequence[str], named: NamedArrays, old: Sequence[Sequence[Any]], given: Sequence[Any], keep: bool
    ) -> Callable:
        """``(old arrays of each parameter, arrays that fill them) -> new arrays of each``, compiled; unless ``keep``, it
        takes the memory of the old ones away. Of the arrays, ``old`` and ``given`` have shapes, dtypes and places."""
        needed = named.needed(params)

        def write(old, arrays):
            with named.bound(dict(zip(needed, arrays, strict=True))):
                parts = [named.parts(param) for param in params]
            return [self._made(*each, keep) for each in zip(params, parts, old, strict=True)]

        places = [[leaf.sharding for leaf in leaves] for leaves in old]
        how = {"out_shardings": places, "keep_unused": True} | ({} if keep else {"donate_argnums": 0})
        return self._program((tuple(map(named.recipe, params)), keep), write, how, (old, given))

    def _made(self, param: str, parts: list[Any], old: Sequence[Any], keep: bool) -> list[Any]:
        """In a trace: the arrays of a parameter, like those of before, of what stands one after another in it."""
        names = self.names(param)
        if len(names) == 1 and len(parts) > 1 and self._shards is None and not keep:
            return [_written(old[0], parts)]
        whole = joined(parts)
        made = rounded(whole, self._stored[param].form.name) if len(names) > 1 else (whole,)
        new = zip(names, made, old, strict=True)
        return [self._on_devices(name, array.astype(leaf.dtype), leaf.shape) for name, array, leaf in new]

    def checker(self, arrays: Sequence[Any]) -> Callable:
        """``arrays -> bool``, compiled: whether all of their numbers are finite."""

        def finite(arrays):
            return jnp.stack([jnp.isfinite(array).all() for array in arrays]).all()

        return self._program("finite", finite, {}, (arrays,))

    def _on_devices(self, name: str, whole: Any, shape: tuple[int, ...]) -> Any:
        """A parameter as its array has it: on one device, or one shard after another along the axis that is split."""
        shards = self._shards
        if shards is None or (split := self._splits[name]).axis is None:
            return whole
        parts, size = [], shape[split.axis] // shards.count
        for shard in range(shards.count):
            indices = indices_of(whole.shape, split, self._config.dimensions, shards, shard)
            part = jnp.concatenate([whole[index] for index in indices])
            missing = [(0, (size - length) * (axis == split.axis)) for axis, length in enumerate(part.shape)]
            parts.append(jnp.pad(part, missing))
        return jnp.concatenate(parts, split.axis)

    def _program(self, what: Any, function: Callable, how: Mapping[str, Any], args: tuple) -> Callable:
        """``function`` for arguments like these. Two that compute the same are compiled once."""
        avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), args)
        kind = what, *((x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(avals))
        if kind not in self._known:
            traced = jax.jit(function, **how).trace(*avals)
            numbers = b"".join(np.asarray(const).tobytes() for const in traced.jaxpr.consts)
            same = str(traced.jaxpr), hashlib.sha256(numbers).digest(), str(how), kind[1:]
            if same not in self._compiled:
                self._compiled[same] = traced.lower().compile()
            self._known[kind] = self._compiled[same]
        return self._known[kind]


def _written(into: Any, parts: Sequence[Any]) -> Any:
    """``joined`` parts in the memory of another array. XLA copies each into its place, as fast as memory can, where it would
    look for the part of every number of a concatenation."""
    start = 0
    for part in parts:
        into = jax.lax.dynamic_update_slice_in_dim(into, part.astype(into.dtype), start, axis=0)
        start += len(part)
    return into
