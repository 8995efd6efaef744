"""Paragraphs and tables of the documents that ``benchmarks.tables`` writes."""

import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 120


def paragraph(text: str, bullet: bool = False) -> str:
    """The text in lines of at most ``WIDTH`` characters, however it was broken; with ``bullet``, as an item of a list."""
    before, indent = ("* ", "  ") if bullet else ("", "")
    lines = textwrap.TextWrapper(
        WIDTH, initial_indent=before, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return lines.fill(" ".join(text.split()))


def table(columns: Sequence[str], rows: Iterable[Sequence]) -> str:
    """A table with these names of columns; cells are shown as ``str`` has them."""
    lines = [columns, *rows]
    text = ["| " + " | ".join(map(str, cells)) + " |" for cells in lines]
    return "\n".join([text[0], "|" + "---|" * len(columns), *text[1:]])


def scientific(x: float) -> str:
    """Two digits and the exponent: 8.0e-4."""
    mantissa, exponent = f"{x:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"
