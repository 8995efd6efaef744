"""What does it cost that the bits of a token's products do not depend on the number of tokens? The kernels of one order of
sums (``jspec.pallas.dispatch.one_order``), beside those that are chosen for speed alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.kernels.invariance.products import (
    LLAMA,
    SMALL,
    Measured,
    Way,
    front_door,
    measure,
    say_failures,
    today,
    weights_for,
)
from benchmarks.kernels.invariance.run import Run, classes, named
from jspec.pallas.dispatch import one_order

KINDS = ("bf16", "int8", "fp8", "blocks", "mxfp8", "int4", "nf4", "nvfp4")
FASTEST, ORDERED = "fastest", "one order"


def ordered(in_parts: bool) -> Callable:
    """The product as models have it where there is one order of sums."""
    product = front_door(in_parts)

    def of_order(x, weight):
        with one_order():
            return product(x, weight)

    return of_order


def cost(run: Run, kind: str, name: str, shape: tuple[int, int], in_parts: bool, tokens: Sequence[int]):
    """A line for each of the two ways: its classes, and its times."""
    weights = weights_for(kind, shape, run.small)
    before: Mapping[int, Measured] = run.kept.get(("today", kind, name), {})
    jobs: dict[Any, tuple[int, Way]] = {
        (FASTEST, count): (count, today(count, weights[0], in_parts)[0]) for count in tokens if count not in before
    }
    jobs |= {(ORDERED, count): (count, Way(ordered(in_parts))) for count in tokens}
    found = say_failures(run, f"{kind} {name}", measure(run, weights, jobs))
    found |= {(FASTEST, count): one for count, one in before.items() if count in tokens}
    for way in (FASTEST, ORDERED):
        of_way = {count: found[way, count] for count in tokens if (way, count) in found}
        times = {str(count): one.took for count, one in of_way.items()}
        cells = ", ".join(f"{count}: {one.took:.1f}{_ratio(found, count, one)}" for count, one in of_way.items())
        moved = [count for count, one in of_way.items() if not one.anywhere]
        note = f"; DEPENDS ON PLACE OR NEIGHBOURS: {moved}" if moved else ""
        key = f"cost, {kind} {name}, {way}"
        run.say(key, f"{named(classes({count: one.first for count, one in of_way.items()}))}{note}; {cells}", us=times)
        run.result.measured.update({f"{key}, {count} tokens": took for count, took in times.items()})


def _ratio(found: Mapping[Any, Measured], count: int, one: Measured) -> str:
    fastest = found.get((FASTEST, count))
    return "" if fastest is None or fastest is one else f" ({one.took / fastest.took:.2f})"


def costs(run: Run, tokens: Sequence[int]):
    """Of the maps of an 8B in all forms."""
    for name, (shape, in_parts) in (SMALL if run.small else LLAMA).items():
        for kind in ("bf16", "int8") if run.small else KINDS:
            run.attempt(f"cost, {kind} {name}", cost, run, kind, name, shape, in_parts, tokens)
