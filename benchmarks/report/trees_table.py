"""What docs/guides/drafting.md says of when a tree of drafts pays, from the results of ``benchmarks.rounds.tree_rounds`` and
``benchmarks.acceptance.trees``."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.report.markdown import paragraph, table
from benchmarks.report.results import Figure

TEMPERATURES = 0.0, 1.0


class Way(NamedTuple):
    """One way to draft: ``head, rows, query tokens``, how long a round takes in ms, and what it is called."""

    head: str
    rows: int
    width: int
    ms: float
    name: str
    is_tree: bool


def acceptance_key(head: str, width: int, temperature: float) -> str:
    """The key of tokens a round, among the results of ``benchmarks.acceptance.trees``."""
    return f"{head}, {width} tokens, T = {temperature:g}"


def gain(rounds: Mapping[str, Figure], acceptance: Mapping[str, Figure]) -> str:
    """Tokens a second with each tree, as a multiple of those with the best chain of the same head and batch."""
    ways = list(_ways(rounds, acceptance))
    cells = []
    for head, rows in dict.fromkeys((way.head, way.rows) for way in ways):
        chains = [way for way in ways if way[:2] == (head, rows) and not way.is_tree]
        for tree in (way for way in ways if way[:2] == (head, rows) and way.is_tree and chains):
            gains = []
            for temperature in TEMPERATURES:
                rates = {way: _tokens(way, acceptance, temperature) / way.ms for way in (tree, *chains)}
                best = max(chains, key=lambda way: rates[way])
                gains.append(f"{rates[tree] / rates[best]:.2f} (over {best.name})")
            cells.append((head, str(rows), tree.name, f"{tree.ms:.2f}", *gains))
    if not cells:
        return ""
    about = """Tokens a second as a multiple of those with the best chain of the same head, for a target of 8 billion
    parameters in bfloat16 on one H200 (`python -m benchmarks.rounds.tree_rounds`), if it accepts what the shipped family
    does (`python -m benchmarks.acceptance.trees`):"""
    header = ("head", "requests", "tree", "ms a round", *(f"T = {t:g}" for t in TEMPERATURES))
    return f"{paragraph(about)}\n\n{table(header, cells)}"


def _ways(rounds: Mapping[str, Figure], acceptance: Mapping[str, Figure]):
    for key, figure in rounds.items():
        _, head, where = key.split(", ")
        rows, width = map(int, where.split(" x "))
        if all(acceptance_key(head, width, t) in acceptance for t in TEMPERATURES):
            shape = re.search(r"tree of (\d+ nodes, depth \d+, branch \d+)", figure.details["what"])
            yield Way(head, rows, width, figure.measured, shape[1] if shape else f"K = {width - 1}", shape is not None)


def _tokens(way: Way, acceptance: Mapping[str, Figure], temperature: float) -> float:
    return acceptance[acceptance_key(way.head, way.width, temperature)].measured
