"""What the server costs beside its engine, in docs/performance.md: written from the figures of ``benchmarks.http``."""

from collections.abc import Mapping

from benchmarks.figures import shown
from benchmarks.http import CONCURRENCIES, DRAWN, TEMPERATURES
from benchmarks.markdown import paragraph, table
from benchmarks.results import Figure

SHARE = 0.97  # of the engine's rate that the server is to reach


def section(figures: Mapping[str, Figure]) -> str:
    """The section "Over HTTP" of docs/performance.md."""
    share = figures["queue, HTTP over engine with text"].measured
    verdict = "met" if share >= SHARE else f"short by {100 * (SHARE - share):.1f} points"
    others = {key: one for key, one in figures.items() if not key.startswith("tpot")}
    kinds = list(DRAWN.values())
    columns = ("at a time", "drafts", *(f"temperature {t:g}" for t in TEMPERATURES))
    rows = [
        (c, kind, *(shown(figures[f"tpot, {kind}, {c}, {t:g}"].measured) for t in TEMPERATURES))
        for c in CONCURRENCIES
        for kind in kinds
    ]
    return "\n\n".join(
        [
            "## Over HTTP",
            paragraph(f"""`python -m benchmarks.http`: the server of `jspec serve`, asked by `jspec bench serve` from another
            process. Requests are those of line 2 of the section above, four drafts of an EAGLE head with synthetic
            acceptance, 64 rows. The server is to reach {100 * SHARE:.0f}% of its engine's rate: {verdict}."""),
            table(("what", "", "measured", "measured on"), [_cells(one) for one in others.values()]),
            paragraph("""Milliseconds per token behind the first, by the requests that are under way at a time and their
            temperature; drafts are always the likeliest ("argmax") or drawn at random ("sampled"):"""),
            table(columns, rows),
        ]
    )


def _cells(one: Figure) -> tuple:
    return one.details["what"], one.details["unit"], shown(one.measured), one.measured_on
