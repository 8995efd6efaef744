"""``TargetWeights``: the arrays of a target, which are written anew in place."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jspec.engine.runner.device_batch import DeviceBatch
from jspec.models.params import Placed, named_leaves, place
from jspec.models.sharding import shard_filler
from jspec.updates.named import NamedArrays, Names, decoder_tensors
from jspec.updates.programs import Programs
from jspec.updates.rounding import ROUNDED

_LISTED = 4  # names in a message


class TargetWeights:
    """The arrays of a target on their devices.

    Args:
      target: a reference to the module, whose arrays are replaced, too; it may be gone.
      batch: which has its arrays, in the order of ``jspec.models.flatten.flatten``.
    """

    def __init__(self, target: Callable[[], Any], batch: DeviceBatch):
        module: Any = target()
        self._target, self._batch, self.config = target, batch, module.config
        self._shards = getattr(module, "shards", None)
        self._programs = Programs(self.config, self._shards)
        named, self._tree = named_leaves(nnx.split(module)[1])
        self._place = {name: i for i, (name, _) in enumerate(named)}
        # Arrays come and go, and may be gone after an error; their kinds stay.
        self._kinds = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in named}

    @property
    def leaves(self) -> list[jax.Array]:
        """The arrays."""
        return self._batch.leaves[0]

    @property
    def num_compiled(self) -> int:
        """How many programs were compiled for updates."""
        return self._programs.num_compiled

    def require_rounding(self):
        """Raise a ValueError, which names a parameter, if one is in a format that nothing rounds to."""
        experts = self.config.experts
        if experts is not None and experts.stored is not None:
            raise ValueError(
                f"the experts of this target are in {experts.stored}, to which new weights are not rounded; load a copy in "
                "bfloat16"
            )
        for name, stored in self.config.stored_params().items():
            if stored.form.name not in ROUNDED:
                raise ValueError(
                    f"parameter {name!r} of this target is in {stored.form.name}, to which new weights are not rounded: "
                    f"expected one of {', '.join(ROUNDED)}; load a copy in bfloat16, or one that jspec-convert quantised"
                )

    def named(self, given: Mapping[str, Any], names: Names) -> NamedArrays:
        """Arrays of a caller, and where they go."""
        return NamedArrays(given, lambda tensors: decoder_tensors(self.config, names, tensors))

    def checked(self, given: Mapping[str, Any], names: Names, keep: bool) -> "Update":
        """All weights of a model, compared with it, with everything compiled that writes them, as ``Update.write`` does with
        ``keep``. Nothing is written.

        Raises:
          ValueError: one is missing, unknown, of another shape or dtype, or has numbers that are not finite, or a tied
            output head is not the embedding.
        """
        named = self.named(given, names)
        if named.unknown:
            raise ValueError(f"weights has {few(named.unknown)}: no place in {self.config.architecture} for these")
        if named.missing:
            raise ValueError(f"weights lacks {few(named.missing)}, which {self.config.architecture} needs")
        for copy, name in named.layout.duplicates.items():
            if not bool(jnp.array_equal(named.arrays[copy], named.arrays[name])):
                raise ValueError(f"weights[{copy!r}] differs from weights[{name!r}], which it is tied to; leave it out")
        update = Update(self, named, _by_layer(named.tensors_of))
        update.require_finite()
        update.compile(keep)
        return update

    def load(self, params: Mapping[str, Any], dtype: str) -> Iterator[str]:
        """Read the arrays from a checkpoint, each in the place of the one before, whose memory is freed first.

        Args:
          params: by their names, stored as the target's are.
          dtype: of the engine.

        Yields:
          the name of each array that was read.
        """
        shards, names = self._shards, [name for name in self._place if name in params]
        kinds = {name: self._kinds[name] for name in names}
        if shards is not None:
            filled = shard_filler(self.config, params, dtype, shards)
            made = (filled(name, kinds[name]) for name in names)
        else:
            where = {name: list(leaf.sharding.device_set) for name, leaf in kinds.items()}
            wanted = [Placed(name, [()], leaf.shape, leaf.dtype, where[name]) for name, leaf in kinds.items()]
            made = (array for [array] in place(params, wanted))
        for name in names:
            self.leaves[self._place[name]].delete()
            self._put(name, next(made))
            yield name

    def kinds(self, param: str) -> list[jax.ShapeDtypeStruct]:
        """Shapes, dtypes and places of the arrays of a parameter."""
        return [self._kinds[name] for name in self._programs.names(param)]

    def old(self, param: str) -> list[jax.Array]:
        """The arrays of a parameter; zeros where an error has left none."""
        arrays = [self.leaves[self._place[name]] for name in self._programs.names(param)]
        pairs = zip(arrays, self.kinds(param), strict=True)
        return [jnp.zeros(k.shape, k.dtype, device=k.sharding) if x.is_deleted() else x for x, k in pairs]

    def replace(self, param: str, new: Sequence[jax.Array]):
        """Have other arrays for a parameter."""
        for name, array in zip(self._programs.names(param), new, strict=True):
            self._put(name, array)

    def _put(self, name: str, array: jax.Array):
        old, drafts = self.leaves[self._place[name]], self._batch.leaves[1]
        self.leaves[self._place[name]] = array
        for i, leaf in enumerate(drafts):
            if leaf is old:  # which a draft head borrows
                drafts[i] = array

    def publish(self):
        """The module has the arrays that the list has by now."""
        if (module := self._target()) is not None:
            nnx.update(module, jax.tree.unflatten(self._tree, self.leaves))

    def writer(self, named: NamedArrays, params: Sequence[str], keep: bool) -> Callable:
        """The compiled function that writes some parameters; see ``Programs.writer``."""
        place = self._place_of_given(params)
        arrays = (named.arrays[name] for name in named.needed(params))
        given = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in arrays]
        return self._programs.writer(params, named, list(map(self.kinds, params)), given, keep)

    def written(self, named: NamedArrays, params: Sequence[str], keep: bool) -> list[list[jax.Array]]:
        """The new arrays of some parameters. What they are made of is sent to their devices, and not copied if it is
        there."""
        old, place = list(map(self.old, params)), self._place_of_given(params)
        given = jax.device_put([named.arrays[name] for name in named.needed(params)], place)
        own = {_memory(array) for arrays in old for array in arrays}
        given = [x.copy() if _memory(x) in own else x for x in given]  # which is about to be written over
        return self.writer(named, params, keep)(old, given)

    def _place_of_given(self, params: Sequence[str]) -> Any:
        place = self.kinds(params[0])[0].sharding
        return NamedSharding(place.mesh, PartitionSpec()) if isinstance(place, NamedSharding) else place

    def finite(self, arrays: Sequence[Any]) -> Any:
        """Whether all numbers of some arrays are finite: a bool, which may be on their device."""
        here = [x for x in arrays if isinstance(x, jax.Array)]
        if not all(np.isfinite(x).all() for x in arrays if not isinstance(x, jax.Array)):
            return False
        return self._programs.checker(here)(here) if here else True


@dataclasses.dataclass
class Update:
    """New weights for some parameters of a target.

    Attributes:
      weights: the target's.
      named: the arrays, by name.
      groups: the parameters that they fill, those together that one program writes.
    """

    weights: TargetWeights
    named: NamedArrays
    groups: list[list[str]]

    @property
    def num_bytes(self) -> int:
        """Of the arrays that were given."""
        return sum(array.nbytes for array in self.named.arrays.values())

    def require_finite(self):
        """Raise a ValueError, which names an array, if a number is not finite. They are read once."""
        named = self.named
        found = [self.weights.finite([named.arrays[name] for name in named.needed(group)]) for group in self.groups]
        for group, finite in zip(self.groups, jax.device_get(found), strict=True):
            if finite:
                continue
            wrong = next(name for name in named.needed(group) if not self.weights.finite([named.arrays[name]]))
            raise ValueError(f"weights[{wrong!r}] has NaN or infinity: expected finite numbers")

    def compile(self, keep: bool):
        """Compile what ``write`` needs with ``keep``, so that writing cannot fail for that."""
        for group in self.groups:
            self.weights.writer(self.named, group, keep)

    def write(self, keep: bool) -> Iterator[tuple[str, list[jax.Array]]]:
        """Write one group after another. Unless ``keep``, the arrays of before are gone from the first on.

        Yields:
          each parameter and its new arrays.
        """
        for group in self.groups:
            yield from zip(group, self.weights.written(self.named, group, keep), strict=True)


def _by_layer(params: Iterable[str]) -> list[list[str]]:
    """Parameters in groups, those of a layer in one: a call of a program takes a host longer than a GPU needs for most."""
    groups: dict[str, list[str]] = {}
    for param in params:
        layer = ".".join(param.split(".")[:2])
        groups.setdefault(layer if param.startswith("layers.") else "", []).append(param)
    return list(groups.values())


def _memory(array: jax.Array) -> int:
    """Where the first of an array's shards begins on its device."""
    return array.addressable_shards[0].data.unsafe_buffer_pointer()


def few(names: Iterable[str]) -> str:
    """Some of several names, in words."""
    names = list(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(map(repr, names[:_LISTED])) + more
