"""Attention over pages: which passes give a query token the same bits, wherever it is in the pass and whatever is beside it.

One text is in the cache. A token of it is read again: alone or with others before and behind it, in verify passes of T query
tokens in each of B rows whose other rows have other texts and lengths, and in prefill passes, whose rows are chunks of the
text. Beside attention as models have it, there are ways that could have one order of sums for any pass."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.invariance.run import Job, Run, bits, compile_all, microseconds, same_everywhere, shape_of
from jspec.config import Rope
from jspec.config.engine import CHUNK
from jspec.engine.runner.compile import decode_options
from jspec.models.cache_pools import LayerKV
from jspec.models.kv_cache import PagedView
from jspec.models.layers import rotation_at
from jspec.pallas.attention.paged import paged_attention_kernel, paged_attention_reference
from jspec.pallas.attention.spec import AttentionSpec
from jspec.pallas.attention.tiling import tiling_of
from jspec.pallas.dispatch import by_platform


class Sizes(NamedTuple):
    """N attention heads and G KV heads of H numbers, pages of P slots, S slots of a row; and what is compared.

    Attributes:
      lengths: of the text that a query sees, its own slot included.
      passes: rows and query tokens of verify passes.
      prefill: tokens of prefill passes.
      timed: lengths of all rows where a pass is timed.
    """

    N: int = 32
    G: int = 8
    H: int = 128
    P: int = 64
    S: int = 8192
    lengths: tuple[int, ...] = (100, 512, 513, 2000, 8000)
    passes: tuple[tuple[int, int], ...] = (
        *((1, T) for T in (1, 2, 5, 8, 16, 64)),
        *((B, T) for B in (4, 16, 64) for T in (1, 5, 16)),
    )
    prefill: tuple[int, ...] = (64, 512, 2048)
    timed: tuple[int, ...] = (2000, 8000)
    chunk: int = CHUNK

    @property
    def most_rows(self) -> int:
        return max(B for B, _ in self.passes)

    @property
    def M(self) -> int:
        return self.S // self.P


SMALL = Sizes(4, 2, 16, 8, 64, (9, 40), ((1, 1), (1, 2), (4, 5)), (16,), (40,), 8)
ROPE = Rope(theta=5e5)
STEPS = 20  # passes of a program that is timed
PROBES = 4  # queries for each length, a page apart


class Seen(NamedTuple):
    """What a pass gave: attention of the ``PROBES`` queries, that of the first one in several places of a pass, and its keys
    as they were written."""

    probes: np.ndarray
    places: list[np.ndarray]
    keys: list[np.ndarray]


def today(view: PagedView, qkv, rotation, kv: LayerKV, G: int):
    """As models have it."""
    return view.extend(qkv, rotation, kv, G, AttentionSpec())


def written_first(view: PagedView, qkv, rotation, kv: LayerKV, G: int, queries: int, part: int | None = None):
    """Keys and values are written before any query attends, and rows are not split, or into parts of ``part`` slots: tiles
    are added up from slot 0 on. A program instance has up to so many queries of a KV head."""
    q, kv = view.rope_and_write_kv(qkv, rotation, kv, G)
    tiling: Any = tiling_of(q.dtype, q.shape[-1])
    tiling = dataclasses.replace(tiling, instances=1, max_splits=1, queries=queries, part_slots=part)
    kernel = functools.partial(paged_attention_kernel, tiling=tiling)
    return by_platform(kernel, paged_attention_reference, q, kv.k, kv.v, view.queries, AttentionSpec(), kv.scales), kv


WAYS: dict[str, Callable] = {
    "today": today,
    "one part": functools.partial(written_first, queries=64),
    "one part, 16 queries": functools.partial(written_first, queries=16),
    **{f"parts of {slots}": functools.partial(written_first, queries=64, part=slots) for slots in (256, 512, 1024)},
}


def program(sizes: Sizes, way: Callable, shared: bool) -> Callable:
    """``(kv, text, table, positions, times) -> (attention, kv)``: a pass, so many times."""

    def run_passes(kv, text, table, positions, times):
        def one(_, carried):
            kv, out = carried
            # The next pass waits for this one.
            qkv = text[positions + (out[:1, :1, 0, 0] > 1e30).astype(jnp.int32)]
            view = PagedView(table, positions, jnp.ones(positions.shape, bool), shared=shared)
            out, kv = way(view, qkv, rotation_at(positions, ROPE, sizes.H), kv, sizes.G)
            return kv, out

        out = jnp.zeros((*positions.shape, sizes.N, sizes.H), text.dtype)
        kv, out = jax.lax.fori_loop(0, times, one, (kv, out))
        return out, kv

    return run_passes


def arguments(sizes: Sizes, B: int, T: int, shared: bool):
    """Shapes of the arguments behind the first two."""
    table = jax.ShapeDtypeStruct((B, sizes.M), jnp.int32)
    return table, jax.ShapeDtypeStruct((B, T), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)


@dataclasses.dataclass
class Texts:
    """The text ``[S, N + 2G, H]``, not rotated, and pools of all rows, in whose first pages it is cached."""

    sizes: Sizes
    text: jax.Array
    kv: LayerKV

    @classmethod
    def make(cls, sizes: Sizes) -> "Texts":
        keys = jax.random.split(jax.random.key(0), 3)
        text = jax.jit(lambda key: jax.random.normal(key, (sizes.S, sizes.N + 2 * sizes.G, sizes.H), jnp.bfloat16))(
            keys[0]
        )
        shape = sizes.G, 1 + sizes.most_rows * sizes.M, sizes.P, sizes.H
        pool = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))
        texts = cls(sizes, text, LayerKV(pool(keys[1]), pool(keys[2])))
        T = sizes.chunk
        positions = jnp.arange(sizes.S, dtype=jnp.int32).reshape(-1, T)
        table = texts.own_table(len(positions))

        def fill(kv, text):
            view = PagedView(table, positions, jnp.ones(positions.shape, bool), shared=True)
            return view.rope_and_write_kv(text[positions], rotation_at(positions, ROPE, sizes.H), kv, sizes.G)[1]

        texts.kv = jax.jit(fill, donate_argnums=0)(texts.kv, text)
        return texts

    def own_table(self, rows: int) -> jax.Array:
        return jnp.broadcast_to(jnp.arange(1, 1 + self.sizes.M, dtype=jnp.int32), (rows, self.sizes.M))

    def call(self, compiled, table, positions, times: int = 1):
        out, self.kv = compiled(self.kv, self.text, table, positions, jnp.int32(times))
        return out

    def verify(self, compiled, B: int, T: int, last: int, index: int, own: int, seed: int):
        """Attention of the query at slot ``last``, which is token ``index`` of row ``own``, and its key. Other rows are at
        random places of their texts, with an odd seed short ones."""
        sizes, rng = self.sizes, np.random.default_rng(seed)
        most = sizes.S - T if seed % 2 == 0 else sizes.S // 8
        first = rng.integers(0, most, B)
        first[own] = last - index
        tables = 1 + np.arange(sizes.most_rows * sizes.M, dtype=np.int32).reshape(-1, sizes.M)
        others = iter(tables[1:])
        table = jnp.asarray(np.stack([tables[0] if b == own else next(others) for b in range(B)]))
        out = self.call(compiled, table, jnp.asarray(first[:, None] + np.arange(T), jnp.int32))
        return np.asarray(out[own, index]), self.key_at(last)

    def prefill(self, compiled, tokens: int, last: int, index: int):
        """The same of a prefill pass whose tokens begin ``index`` before the query."""
        T = self.sizes.chunk
        positions = last - index + jnp.arange(tokens, dtype=jnp.int32).reshape(-1, T)
        out = self.call(compiled, self.own_table(tokens // T), positions)
        return np.asarray(out[index // T, index % T]), self.key_at(last)

    def key_at(self, slot: int):
        return np.asarray(self.kv.k[:, 1 + slot // self.sizes.P, slot % self.sizes.P])


def attention(run: Run, tokens):
    """All ways; classes for each length, and then the times."""
    del tokens
    sizes = SMALL if run.small else Sizes()
    texts = Texts.make(sizes)
    passes = {f"{B}x{T}": (B, T, False) for B, T in sizes.passes}
    passes |= {f"prefill {count}": (count // sizes.chunk, sizes.chunk, True) for count in sizes.prefill}
    options = {(B, T): decode_options([], B * T) for B, T, _ in passes.values()}
    jobs = {
        (way, name): Job(
            program(sizes, function, shared),
            (shape_of(texts.kv), shape_of(texts.text), *arguments(sizes, B, T, shared)),
            options[B, T],
            donate=0,
        )
        for way, function in WAYS.items()
        for name, (B, T, shared) in passes.items()
        if way == "today" or B in (1, 16) or shared
    }
    programs = compile_all(jobs)
    found: dict[str, dict[Any, Any]] = {way: {} for way in WAYS}
    for way in WAYS:
        for name in [name for of, name in jobs if of == way]:
            run.attempt(
                f"attention, {way}, {name}", compare, run, texts, programs[way, name], passes[name], name, found[way]
            )
        run.attempt(f"attention, {way}, classes", say_way, run, way, found[way])
    if run.small:
        return
    for length in sizes.lengths:
        firsts = {way: next(iter(of[length].values())).probes for way, of in found.items() if length in of}
        run.say_classes(f"attention, ways, length {length}, 1x1", firsts)


def compare(run: Run, texts: Texts, compiled, size: tuple[int, int, bool], name: str, found):
    """Fill ``found`` with the results of a pass by length, and time it."""
    if isinstance(compiled, Exception):
        raise compiled
    (B, T, shared), sizes = size, texts.sizes
    with run.watched():
        for length in sizes.lengths:
            page = sizes.P if length < sizes.S // 2 else -sizes.P
            lasts = [length - 1 + page * probe for probe in range(1 if run.small else PROBES)]
            last = lasts[0]
            if shared:
                indices = dict.fromkeys(min(last, index) for index in (B * T - 1, B * T // 2, 0))
                places = [texts.prefill(compiled, B * T, last, i) for i in indices if last - i + B * T <= sizes.S]
                probes = [texts.prefill(compiled, B * T, slot, min(slot, B * T - 1))[0] for slot in lasts]
            else:
                where = [(index, 0, 0) for index in dict.fromkeys((0, T // 2, T - 1)) if index <= last]
                where += [(0, B - 1, 0), (0, 0, 1), (0, B // 2, 3)] if B > 1 else []
                places = [texts.verify(compiled, B, T, last, *place) for place in where]
                probes = [texts.verify(compiled, B, T, slot, 0, 0, 0)[0] for slot in lasts]
            found.setdefault(length, {})[name] = Seen(np.stack(probes), *map(list, zip(*places, strict=True)))
        times = {}
        for length in sizes.timed:
            first = length - (B * T if shared else T)
            count = jnp.arange(B * T, dtype=jnp.int32).reshape(B, T)
            positions = first + (count if shared else count % T)
            table = texts.own_table(B) if shared else 1 + jnp.arange(B * sizes.M, dtype=jnp.int32).reshape(B, -1)
            steps = 1 if run.small else STEPS
            call = lambda: texts.call(compiled, table, positions, steps)  # noqa: B023, E731
            if first >= 0:
                times[length] = microseconds(call, steps, run.small)
    found.setdefault("us", {})[name] = times


def say_way(run: Run, way: str, found):
    """The classes of a way, by length, and its times."""
    times = found.pop("us", {})
    for length, by_pass in found.items():
        firsts = {name: seen.probes for name, seen in by_pass.items()}
        moved = [name for name, seen in by_pass.items() if not same_everywhere(seen.places)]
        keys = {bits(key) for seen in by_pass.values() for key in seen.keys}
        note = f"; place or neighbours matter: {', '.join(moved)}" if moved else ""
        note += "" if len(keys) == 1 else f"; {len(keys)} KINDS OF KEYS WRITTEN"
        run.say_classes(f"attention, {way}, length {length}", firsts, note, moved=moved)
    for name, by_length in times.items():
        cells = ", ".join(f"{took:.1f} us at {length:,}" for length, took in by_length.items())
        print(f"    {way}, {name}: {cells}", flush=True)
        run.result.measured.update({f"attention, {way}, {name}, {length}": took for length, took in by_length.items()})
