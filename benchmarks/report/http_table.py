"""What the server costs beside its engine, in docs/results/performance.md: written from the figures of
``benchmarks.engine.http``."""

from collections.abc import Mapping

from benchmarks.engine.http import AT_A_TIME, CONCURRENCIES, DRAFTING, DRAFTS, DRAWN, METHODS, TEMPERATURES
from benchmarks.report.figures import shown
from benchmarks.report.markdown import paragraph, table
from benchmarks.report.results import Figure

SHARE = 0.97  # of the engine's rate that the server is to reach


def section(figures: Mapping[str, Figure]) -> str:
    """The section "Over HTTP" of docs/results/performance.md."""
    share = figures["queue, HTTP over engine with text"].measured
    verdict = "met" if share >= SHARE else f"short by {100 * (SHARE - share):.1f} points"
    others = {key: figure for key, figure in figures.items() if not key.startswith(("tpot", "drafting"))}
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
            paragraph(f"""`python -m benchmarks.engine.http`: the server of `jspec serve`, asked by `jspec bench serve`
            from another process. Requests are those of line 2 of the section above, four drafts of an EAGLE head with
            synthetic acceptance, 64 rows. The server is to reach {100 * SHARE:.0f}% of its engine's rate: {verdict}."""),
            table(("what", "", "measured", "measured on"), [_cells(figure) for figure in others.values()]),
            paragraph("""Milliseconds per token behind the first, by the requests that are under way at a time and their
            temperature; drafts are always the likeliest ("argmax") or drawn at random ("sampled"):"""),
            table(columns, rows),
            paragraph("""Drafting in one pass of mask tokens ("parallel", a head of four layers) beside drafting one token
            after the other ("sequential", an EAGLE-3 head of one layer), with K drafts in a round, over 16 rows, prompts of
            512 tokens, temperature 1. Acceptance is the same for both, 0.7 for each draft behind accepted ones:"""),
            table(*_drafting(figures)),
        ]
    )


def _drafting(figures: Mapping[str, Figure]) -> tuple[tuple, list[tuple]]:
    """Columns and rows of the table that compares parallel and sequential drafting."""
    columns = ("at a time", "drafting", *(f"{what}, {unit}, K = {K}" for _, _, what, unit in DRAFTING for K in DRAFTS))
    keys = [(f"drafting, {{}}, {K}, {{}}, {key}") for _, key, _, _ in DRAFTING for K in DRAFTS]

    def cell(key: str) -> str:
        return shown(figures[key].measured) if key in figures else "-"

    rows = [(n, kind, *(cell(key.format(kind, n)) for key in keys)) for n in AT_A_TIME for kind in METHODS.values()]
    return columns, rows


def _cells(figure: Figure) -> tuple:
    return figure.details["what"], figure.details["unit"], shown(figure.measured), figure.measured_on
