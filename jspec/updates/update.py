"""``ModelWeights``: new weights for the target and the draft of an engine, from arrays or from a stream of arrays."""

import collections
import contextlib
import dataclasses
import functools
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

import jax
from flax import nnx

from jspec._validation import require
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.tensors.finite import require_finite
from jspec.checkpoints.tensors.params import stored_params
from jspec.engine.engine import Engine
from jspec.engine.loop import Loop
from jspec.models.flatten import without_arrays
from jspec.models.params import named_leaves
from jspec.models.protocols import Target
from jspec.updates.draft import built_like, draft_of
from jspec.updates.named import Names, require_array
from jspec.updates.target import TargetWeights, Update, few

_AT_ONCE = 2**28  # bytes of a stream that are looked at together


@dataclasses.dataclass(frozen=True)
class WeightUpdate:
    """What an update did.

    Example::

        done = jspec.load("path/to/target").restore()
        print(f"{done.num_bytes / 1e9:.1f} GB in {done.seconds:.2f} s; version {done.version}")

    Attributes:
      version: of the weights that the model has now, as in ``Result.weights_versions``.
      seconds: how long it took, until the device had written all of them; that of a mapping without the wait for requests
        under way.
      num_bytes: of the arrays that were given.
      copied_bytes: of a second copy that stood beside the weights of before, which ``atomic=True`` makes; else 0.
      num_compilations: how many programs were compiled for it: some for the first one, none for others like it.
    """

    version: int | str
    seconds: float
    num_bytes: int
    copied_bytes: int
    num_compilations: int


@dataclasses.dataclass(frozen=True)
class Origin:
    """The checkpoints that a model was loaded from.

    Attributes:
      target: the target's.
      draft: the draft's; None if it has none.
    """

    target: Checkpoint
    draft: Checkpoint | None

    @property
    def is_in_memory(self) -> bool:
        """Whether the weights of either cannot be read again."""
        return any(one is not None and one.is_in_memory for one in (self.target, self.draft))


class ModelWeights:
    """The weights of an engine, which one caller at a time may replace.

    Args:
      engine: whose requests wait meanwhile.
      target: its target.
      draft: the module that drafts, or None.
      origin: the checkpoints of both; None if they were not loaded from any.
    """

    def __init__(self, engine: Engine, target: Target, draft: Any, origin: Origin | None):
        self._engine, self._origin = engine, origin
        # References keep no memory of a device: a model may be closed, and a draft is the engine's alone.
        self._target, self._draft = weakref.ref(target), without_arrays(draft)
        self._busy, self._writing, self._count = threading.Lock(), threading.Lock(), 0

    @functools.cached_property
    def target(self) -> TargetWeights:
        """The target's."""
        return TargetWeights(self._target, self._engine.runner.batch)

    def update(
        self,
        weights: Mapping[str, Any] | Iterable[tuple[str, Any]] | None,
        draft: Mapping[str, Any] | None,
        version: int | str | None,
        names: Names,
        atomic: bool,
        wait: bool,
        recompute: bool = False,
    ) -> WeightUpdate:
        """As ``LLM.update_weights``."""
        require(names in get_args(Names), "names", names, f"one of {', '.join(get_args(Names))}")
        require(version is None or isinstance(version, int | str), "version", version, "an int, a str or None")
        require(weights is not None or draft is not None, "weights", weights, "weights, or draft=")
        require(draft is None or isinstance(draft, Mapping), "draft", draft, "a mapping of names to arrays")
        if weights is not None and not isinstance(weights, Mapping):
            self._require_pause(wait)
        with self._alone():
            began, compiled = time.perf_counter(), self.target.num_compiled
            new_draft = None if draft is None else self._draft_of(draft, names)
            num_bytes = sum(array.nbytes for array in (draft or {}).values())
            changes: list[Update] = []
            if isinstance(weights, Mapping):
                self.target.require_rounding()
                given: Any = weights
                changes = [self.target.checked(given, names, atomic)]
                num_bytes += changes[0].num_bytes
            elif weights is not None:
                self.target.require_rounding()
                streamed = _Stream(self, names, atomic, wait)
                num_bytes += streamed.read(weights)
                changes = streamed.kept

            def apply():
                begin = time.perf_counter()
                with self._replacing():
                    copied = self._write(changes, atomic)
                    if new_draft is not None:
                        self._engine.loop.replace_draft(new_draft)
                    return copied, self.finish(version, recompute), time.perf_counter() - begin

            prepared = time.perf_counter() - began
            copied, now, seconds = self._engine.between_requests(apply, wait)
            return WeightUpdate(now, prepared + seconds, num_bytes, copied, self.target.num_compiled - compiled)

    def load(
        self, folder: str | os.PathLike | None, version: int | str | None, wait: bool, recompute: bool = False
    ) -> WeightUpdate:
        """As ``LLM.update_weights_from``; None is the folder that the model was loaded from, whose draft is read, too.

        Raises:
          ValueError: the folder holds another model, its weights are stored in another way or not finite, or a file of it is
            damaged.
        """
        self._require_pause(wait)
        with self._alone():
            began, dtype = time.perf_counter(), self._engine.config.dtype
            if folder is None and (self._origin is None or self._origin.is_in_memory):
                raise ValueError("restore() needs the folder that a model was loaded from, and this one was not")
            checkpoint = Checkpoint.open(folder) if folder is not None else self._origin.target  # pyright: ignore
            config, params = checkpoint.language_model(dtype)
            own = stored_params(self.target.config, dtype)
            if (found := stored_params(config, dtype)) != own:
                name = next(name for name in (*own, *found) if own.get(name) != found.get(name))
                raise ValueError(
                    f"{checkpoint.folder.given}: parameter {name!r} is {found.get(name)}: expected {own.get(name)}, as in "
                    "the model that is loaded"
                )
            if folder is not None:  # so that an error leaves the weights of before
                require_finite(params.without(()), checkpoint.folder.given)
            old = self._origin and self._origin.draft if folder is None else None
            draft = None if old is None else built_like(self._draft, self._own_params(old, dtype), dtype, self._shards)

            def apply():
                with self._replacing() as loop:
                    loop.incomplete = "a folder could not be read to its end"
                    try:
                        collections.deque(self.target.load(params, dtype), maxlen=0)
                    finally:
                        self.target.publish()
                    if draft is not None:
                        loop.replace_draft(draft)
                    return self.finish(version, recompute)

            now = self._engine.between_requests(apply, wait)
            num_bytes = sum(array.nbytes for array in self.target.leaves)
            return WeightUpdate(now, time.perf_counter() - began, num_bytes, 0, 0)

    def _require_pause(self, wait: bool):
        """Refuse not to ``wait`` for requests that would be served with a part of new weights."""
        told = "True, or pause('keep') before it, for a stream or a folder: nothing is served with a part of it"
        require(wait or self._engine.is_paused, "wait", wait, told)

    def _own_params(self, checkpoint: Checkpoint, dtype: str) -> Any:
        """The params of the draft's checkpoint that its module has, without those that it borrows."""
        params, own = checkpoint.params(dtype), stored_params(self._draft.config, dtype)
        return params.without([name for name in params if name not in own])

    @property
    def _shards(self) -> Any:
        return getattr(self._target(), "shards", None)

    def _draft_of(self, draft: Mapping[str, Any], names: Names) -> Any:
        checkpoint = self._origin and self._origin.draft
        return draft_of(self._draft, checkpoint, draft, names, self._engine.config.dtype, self._shards)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        self._engine.handle.require_usable()
        if self._engine.runner.batch.group is not None:
            raise RuntimeError("weights cannot be replaced where the target's devices belong to several processes")
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("another update of the weights is under way; wait for it")
        try:
            yield
        finally:
            self._busy.release()

    @contextlib.contextmanager
    def standing(self) -> Iterator[list[jax.Array]]:
        """The target's arrays, which are whole and are not written meanwhile.

        Raises:
          NotServing: they are incomplete, or not on the device.
        """
        with self._writing:
            self._engine.handle.require_usable()
            self._engine.loop.require_weights()
            yield self._engine.runner.batch.leaves[0]

    def head(self) -> tuple[Any, dict[str, jax.Array]]:
        """The config of the module that drafts, and its arrays by name."""
        with self.standing():
            names = [name for name, _ in named_leaves(nnx.split(self._draft)[1])[0]]
            return self._draft.config, dict(zip(names, self._engine.runner.batch.leaves[1], strict=True))

    @contextlib.contextmanager
    def _replacing(self) -> Iterator[Loop]:
        """In the engine's thread, while it writes weights: callers wait."""
        loop = self._engine.loop
        with self._writing:
            loop.replacing = True
            try:
                yield loop
            finally:
                loop.replacing = False

    def _write(self, changes: Iterable[Update], atomic: bool) -> int:
        """In the engine's thread: write parameters, and say what a second copy took."""
        copied = 0
        for change in changes:
            if atomic:
                fresh = dict(change.write(keep=True))
                jax.block_until_ready(list(fresh.values()))
                copied += sum(array.nbytes for arrays in fresh.values() for array in arrays)
                self._publish(fresh.items())
            else:
                self._publish(change.write(keep=False))
        return copied

    def _publish(self, written: Iterable[tuple[str, list[jax.Array]]]):
        """In the engine's thread: have new arrays; whatever ends it early leaves the weights incomplete."""
        loop = self._engine.loop
        loop.incomplete = loop.incomplete or "an update ended early"
        try:
            for param, arrays in written:
                self.target.replace(param, arrays)
        finally:
            self.target.publish()

    def write_part(self, change: Update, wait: bool):
        """Write some parameters of a stream, which leaves the weights incomplete."""

        def apply():
            with self._replacing() as loop:
                loop.incomplete = "a stream of new weights is under way, or ended early"
                self._publish(change.write(keep=False))

        self._engine.between_requests(apply, wait)

    def finish(self, version: int | str | None, recompute: bool = False) -> int | str:
        """In the engine's thread: the weights are whole, and of a new version."""
        loop = self._engine.loop
        jax.block_until_ready(self.target.leaves)
        loop.forget_weights(recompute)  # which reads the last tokens of the version before
        self._count += 1
        loop.weights_version = self._count if version is None else version
        loop.incomplete = None
        return loop.weights_version


class _Stream:
    """Weights that come one after another, of which a parameter is written once all of its arrays are there.

    Attributes:
      kept: with ``atomic``, all that came: it is written in the end.
    """

    def __init__(self, weights: ModelWeights, names: Names, atomic: bool, wait: bool):
        self._weights, self._atomic, self._wait = weights, atomic, wait
        self._names: Names = names
        self._pending: dict[str, Any] = {}
        self._seen: set[str] = set()
        self._written: set[str] = set()
        self.kept: list[Update] = []

    def read(self, pairs: Iterable[tuple[str, Any]]) -> int:
        """Read all of a stream; returns its bytes.

        Raises:
          ValueError: an array is unknown, given twice, of another shape or dtype, or not finite, or some are missing.
        """
        total = waiting = 0
        for name, array in pairs:
            require_array(name, array)
            if name in self._seen:
                raise ValueError(f"weights[{name!r}] was given twice in one stream")
            self._seen.add(name)
            self._pending[name] = array
            total, waiting = total + array.nbytes, waiting + array.nbytes
            if waiting >= _AT_ONCE and not self._atomic:
                self._write_whole()
                waiting = 0
        if self._atomic:
            self.kept = [self._weights.target.checked(self._pending, self._names, keep=True)]
        else:
            self._write_whole()
            self._require_all()
        return total

    def _write_whole(self):
        """Write the parameters all of whose arrays are there."""
        target = self._weights.target
        named = target.named(self._pending, self._names)
        if named.unknown:
            raise ValueError(f"weights has {few(named.unknown)}, for which the model has no place")
        whole = [param for param in named.tensors_of if param not in self._written and named.is_whole(param)]
        change = Update(target, named, [[param] for param in whole])
        change.require_finite()
        change.compile(keep=False)
        self._weights.write_part(change, self._wait)
        self._written.update(whole)
        done = set(named.needed(whole))
        self._pending = {name: array for name, array in self._pending.items() if name not in done}

    def _require_all(self):
        named = self._weights.target.named(self._pending, self._names)
        missing = [param for param in named.tensors_of if param not in self._written]
        if missing:
            raise ValueError(f"the stream of weights ended early: it lacks what fills {few(missing)}")
