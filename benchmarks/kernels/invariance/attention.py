"""Attention over pages: which passes give a query token the same bits, wherever it is in the pass and whatever is beside it.

One text is in the cache. A token of it is read again: alone or with others before and behind it, in verify passes of T query
tokens in each of B rows whose other rows have other texts and lengths, and in prefill passes, whose rows are chunks of the
text. Beside the kernels of one order there are those that are chosen for speed alone."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.invariance.run import Job, Run, bits, compile_all, microseconds, same_everywhere, shape_of
from jspec.config import Rope
from jspec.config.engine import CHUNK, CHUNK_OF_STATES
from jspec.engine.runner.compile import decode_options
from jspec.models.cache_pools import LayerKV
from jspec.models.kv_cache import PagedView
from jspec.models.layers import rotation_at
from jspec.pallas.attention.fp8 import KVScales, rounded
from jspec.pallas.attention.spec import AttentionSpec
from jspec.pallas.dispatch import one_order


class Sizes(NamedTuple):
    """N attention heads and G KV heads of H numbers, pages of P slots, S slots of a row; and what is compared.

    Attributes:
      lengths: of the text that a query sees, its own slot included.
      passes: rows and query tokens of verify passes.
      prefill: tokens of prefill passes.
      timed: lengths of all rows where a pass is timed.
      rounded: whether the cache has bytes, with a scale for each token.
    """

    N: int = 32
    G: int = 8
    H: int = 128
    P: int = 64
    S: int = 8192
    lengths: tuple[int, ...] = (100, 512, 513, 2000, 8000)
    passes: tuple[tuple[int, int], ...] = ((1, 1), (1, 5), (1, 16), (16, 1), (16, 5), (64, 1), (64, 5))
    prefill: tuple[int, ...] = (64, 512, 2048)
    timed: tuple[int, ...] = (2000, 8000)
    chunk: int = CHUNK
    rounded: bool = False

    @property
    def most_rows(self) -> int:
        return max(B for B, _ in self.passes)

    @property
    def M(self) -> int:
        return self.S // self.P


HEADS = {"8B": Sizes(), "27B": Sizes(24, 4, 256, chunk=CHUNK_OF_STATES), "8B, FP8": Sizes(rounded=True)}
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


WAYS = {"one order": True, "fastest": False}


def program(sizes: Sizes, ordered: bool, shared: bool) -> Callable:
    """``(kv, text, table, positions, times) -> (attention, kv)``: a pass as models have it, so many times."""

    @one_order(ordered)
    def run_passes(kv, text, table, positions, times):
        def one(_, carried):
            kv, out = carried
            # The next pass waits for this one.
            qkv = text[positions + (out[:1, :1, 0, 0] > 1e30).astype(jnp.int32)]
            valid = jnp.ones(positions.shape, bool)
            view = PagedView(table, positions, valid, shared=shared, may_up_project=shared)
            out, kv = view.extend(qkv, rotation_at(positions, ROPE, sizes.H), kv, sizes.G, AttentionSpec())
            return kv, out

        out = jnp.zeros((*positions.shape, sizes.N, sizes.H), text.dtype)
        kv, out = jax.lax.fori_loop(0, times, one, (kv, out))
        return out, kv

    return run_passes


def arguments(sizes: Sizes, B: int, T: int, shared: bool):
    """Shapes of the arguments behind the first two."""
    table = jax.ShapeDtypeStruct((B, sizes.M), jnp.int32)
    return table, jax.ShapeDtypeStruct((B, T), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)


def in_bytes(kv: LayerKV) -> LayerKV:
    """Keys and values rounded to eight bits, with a scale for each token."""
    assert kv.v is not None
    (k, k_scale), (v, v_scale) = (rounded(jnp.moveaxis(x, 0, 2), None) for x in (kv.k, kv.v))
    k, v, k_scale, v_scale = (jnp.moveaxis(x, 2, 0) for x in (k, v, k_scale, v_scale))
    return LayerKV(k, v, KVScales(k_scale, v_scale))


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
        kv = LayerKV(pool(keys[1]), pool(keys[2]))
        if sizes.rounded:
            kv = jax.jit(in_bytes)(kv)
        texts = cls(sizes, text, kv)
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
    """All ways of all sizes; classes for each length, and then the times."""
    del tokens
    for name, sizes in ({"small": SMALL} if run.small else HEADS).items():
        run.attempt(f"attention, {name}", compare_ways, run, name, sizes)


def compare_ways(run: Run, name: str, sizes: Sizes):
    """Classes of equal bits among the passes of each way, and its times."""
    texts = Texts.make(sizes)
    passes = {f"{B}x{T}": (B, T, False) for B, T in sizes.passes}
    passes |= {f"prefill {count}": (count // sizes.chunk, sizes.chunk, True) for count in sizes.prefill}
    jobs = {
        (way, of): Job(
            program(sizes, WAYS[way], shared),
            (shape_of(texts.kv), shape_of(texts.text), *arguments(sizes, B, T, shared)),
            decode_options([], B * T),
            donate=0,
        )
        for way in WAYS
        for of, (B, T, shared) in passes.items()
    }
    programs, found = compile_all(jobs), dict[str, dict[Any, Any]]()
    for way in WAYS:
        key, found[way] = f"{name}, {way}", {}
        for of in [of for other, of in jobs if other == way]:
            run.attempt(f"{key}, {of}", compare, run, texts, programs[way, of], passes[of], of, found[way])
        run.attempt(f"{key}, classes", say_way, run, key, found[way])


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
