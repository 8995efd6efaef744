"""What would it cost if the bits of a token's products did not depend on the number of tokens? Products whose sums have one
order for any number of tokens, beside those of today."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from benchmarks.kernels.invariance.products import (
    LLAMA,
    SMALL,
    Measured,
    Way,
    measure,
    say_failures,
    today,
    weights_for,
)
from benchmarks.kernels.invariance.run import Run, classes, named
from jspec.pallas.matmul.bf16 import bf16_matmul_kernel
from jspec.pallas.matmul.few_tokens import LOWERS
from jspec.pallas.matmul.partial_sums import PartialSums
from jspec.pallas.matmul.sm90_tiling import SHARED, MosaicTiling
from jspec.pallas.matmul.tiling import MatmulTiling
from jspec.pallas.matmul.weight_only import weight_only_matmul_kernel

TOKENS = (1, 5, 16, 80, 320, 2048)
KINDS = ("bf16", "int4", "int8", "blocks", "nvfp4", "mxfp4")
SHAPES = ("gate_up", "down", "qkv")
TILES = 132  # as many tiles, splits included, as multiprocessors or fewer
UNTUNED = {"xla_gpu_autotune_level": 0}


def splits_for(shape: tuple[int, int], side: int = 2) -> int:
    """Parts of the inputs, from the weight's shape alone: as many as have multiprocessors of their own."""
    tiles, splits = shape[0] // (64 * side), 1
    while 2 * splits * tiles <= TILES and splits < 8:
        splits *= 2
    return splits


def fixed_tiling(tokens: int, shape: tuple[int, int], kind: str, turns: int, splits: int) -> MosaicTiling:
    """A tiling of the Mosaic kernel in which the order of sums is that of ``turns`` and ``splits``, and what follows from
    the number of tokens are the sizes of tiles alone."""
    in_groups = kind in ("blocks", "int4")
    few, several = 40 if in_groups else 80, 128 if kind == "blocks" or turns > 1 else 160
    most = few if tokens <= few else several
    tiles = pl.cdiv(tokens, most)
    tile = 8 * pl.cdiv(pl.cdiv(tokens, tiles), 8)
    warpgroups = 4 if tokens <= few else 2
    side = min(warpgroups // turns, 2)
    if turns == 1 and warpgroups == 4 and kind != "bf16" and shape[0] // 256 * splits >= 100:
        side = 4  # which convert weights faster
    tall = tiles > 1 and side == 2 and not in_groups and kind != "nvfp4" and shape[0] % 256 == 0
    size = {"bf16": 2.0, "int4": 0.5, "nvfp4": 0.5}.get(kind, 1.0)
    depth = {2.0: 64, 1.0: 128, 0.5: 256 if turns == 1 else 128}[size]
    tiling = MosaicTiling(128 if tall else 64, tile, depth, 0, side, turns, num_splits=splits)
    for stages in range(turns, 17, turns):
        more = tiling._replace(num_stages=stages)
        if more.shared_bytes(shape[1], size, 4) <= SHARED:
            tiling = more
    return tiling


def by_mosaic(tiling: MosaicTiling) -> Callable:
    from jspec.pallas.matmul.few_tokens_sm90 import few_tokens_matmul_kernel

    return lambda x, weight: few_tokens_matmul_kernel(x, weight, x.dtype, tiling=tiling)


def by_triton(kind: str, tiling: MatmulTiling) -> Callable:
    """The Triton kernels with one depth of step and one number of splits."""

    def product(x, weight):
        if kind != "bf16":
            return weight_only_matmul_kernel(x, weight, x.dtype, tiling=tiling)
        y = bf16_matmul_kernel(x, weight.numbers, tiling=tiling)
        return y.summands if isinstance(y, PartialSums) else y

    return product


def padded(product: Callable, unit: int) -> Callable:
    """The product of as many tokens as fill whole units."""

    def of_padded(x, weight):
        return product(jnp.pad(x, ((0, -len(x) % unit), (0, 0))), weight)[: len(x)]

    return of_padded


def in_pieces(product: Callable, unit: int) -> Callable:
    """Products of so many tokens, one after another; the last is padded."""

    def of_pieces(x, weight):
        pieces = [padded(product, unit)(x[i : i + unit], weight) for i in range(0, len(x), unit)]
        return jnp.concatenate(pieces)

    return of_pieces


def candidates(kind: str, shape: tuple[int, int], in_parts: bool, weight) -> dict[str, Callable[[int], Way]]:
    """Ways by name, each of which makes that for a number of tokens."""
    front = lambda tokens: today(tokens, weight, in_parts)[0]  # noqa: E731
    ways: dict[str, Callable[[int], Way]] = {
        "in pieces of 64": lambda tokens: Way(in_pieces(front(64).product, 64), tuned=front(64).tuned)
    }
    splits = splits_for(shape)
    if LOWERS and kind != "mxfp4" and shape[0] >= 4096:
        for turns, parts in dict.fromkeys(((1, 1), (1, splits), (2, 1), (2, splits))):
            name = f"wgmma, {turns} in turns, {parts} parts"
            ways[name] = lambda tokens, turns=turns, parts=parts: Way(
                by_mosaic(fixed_tiling(tokens, shape, kind, turns, parts))
            )
    if kind == "bf16":
        xla = lambda x, w: jnp.einsum("ti,oi->to", x, w.numbers)  # noqa: E731
        ways["XLA, not tuned"] = lambda tokens: Way(xla, UNTUNED)
        ways["cuBLAS, not tuned"] = lambda tokens: Way(xla, {**UNTUNED, "xla_gpu_enable_triton_gemm": False})
        ways["XLA, padded to 128s"] = lambda tokens: Way(padded(xla, 128), tuned=True)
    if kind in ("bf16", "mxfp4", "int4") and shape not in (shape for shape, _ in SMALL.values()):
        depth = 64 if kind == "bf16" else 128

        def triton(tokens: int) -> Way:
            tile = min(max(16, 1 << (tokens - 1).bit_length()), 128)
            warps = 4 if tile <= 64 else 8
            return Way(by_triton(kind, MatmulTiling(128, tile, depth, warps, 3, num_splits=splits if in_parts else 1)))

        ways[f"Triton, steps of {depth}"] = triton
    return ways


def cost(run: Run, kind: str, name: str, shape: tuple[int, int], in_parts: bool, tokens: Sequence[int]):
    """A line for each way: its classes, and its times beside those of today."""
    weights = weights_for(kind, shape, run.small)
    before: Mapping[int, Measured] = run.kept.get(("today", kind, name), {})
    jobs: dict[Any, tuple[int, Way]] = {
        ("today", count): (count, today(count, weights[0], in_parts)[0]) for count in tokens if count not in before
    }
    for way, make in candidates(kind, shape, in_parts, weights[0]).items():
        for count in tokens:
            if way != "in pieces of 64" or 64 < count <= 640:
                jobs[way, count] = count, make(count)
    found = say_failures(run, f"{kind} {name}", measure(run, weights, jobs))
    found |= {("today", count): one for count, one in before.items() if count in tokens}
    by_bits = {
        label: group[0] for group in classes({label: one.first for label, one in found.items()}) for label in group
    }
    for way in dict.fromkeys(way for way, _ in found):
        of_way = {count: found[way, count] for count in tokens if (way, count) in found}
        groups = classes({count: one.first for count, one in of_way.items()})
        times = {str(count): one.took for count, one in of_way.items()}
        ratios = {
            str(count): one.took / found["today", count].took
            for count, one in of_way.items()
            if ("today", count) in found
        }
        cells = ", ".join(f"{count}: {times[count]:.1f} us ({ratios.get(count, float('nan')):.2f})" for count in times)
        alike = sorted(
            {
                f"{other} {count}"
                for (other, count) in by_bits
                if by_bits[other, count] == by_bits[way, next(iter(of_way))]
            }
        )
        moved = [count for count, one in of_way.items() if not one.anywhere]
        note = f"; DEPENDS ON PLACE OR NEIGHBOURS: {moved}" if moved else ""
        key = f"cost, {kind} {name}, {way}"
        run.say(key, f"{named(groups)}{note}; {cells}", us=times, ratio=ratios, bits_of_first_also_in=alike)
        run.result.measured.update({f"{key}, {count} tokens": took for count, took in times.items()})
    over_all = [group for group in classes({label: one.first for label, one in found.items()}) if len(group) > 1]
    print(f"    classes over all ways: {named(_by_way(group) for group in over_all)}", flush=True)


def _by_way(group: Sequence[tuple[str, int]]) -> list[str]:
    """Members of a class, way by way."""
    ways = dict.fromkeys(way for way, _ in group)
    return [f"{way} ({', '.join(str(count) for one, count in group if one == way)});" for way in ways]


def costs(run: Run, tokens: Sequence[int]):
    """Those of the two large maps first."""
    shapes = SMALL if run.small else {name: LLAMA[name] for name in SHAPES}
    counts = [count for count in tokens if run.small or count in TOKENS] or list(tokens)
    for name, (shape, in_parts) in shapes.items():
        for kind in ("bf16",) if run.small else KINDS[: 5 if name == "gate_up" else 3]:
            run.attempt(f"cost, {kind} {name}", cost, run, kind, name, shape, in_parts, counts)
