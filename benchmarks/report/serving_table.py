"""How requests are served, in docs/results/performance.md and README.md: written from the figures of
``benchmarks.engine.serving``."""

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.report.figures import shown
from benchmarks.report.markdown import paragraph, table
from benchmarks.report.results import Figure

# What each line of the benchmark measures. "2" stands for the figures "2" and "2, ...", "2, auto" for those that begin so.
MEASURES = {
    "1": "a queue over 64 rows, plain decoding",
    "2": "a queue over 64 rows with an EAGLE head",
    "2, auto": "the queue of line 2 where the engine chooses the number of drafts by costs that it measured",
    "3": "queues over 16 rows",
    "4": "first tokens of prompts that arrive together",
    "5": "the first token of a prompt of 32,000 tokens",
    "6": "a round of one request in an engine of 64 rows",
    "7": "the longest time that one of 15 requests gets no token while a prompt of 32,000 tokens is read",
    "8": "a queue like that of line 2, over the time that the GPU takes for the same programs when all are sent at once",
    "9": "the start of an engine whose programs an earlier process compiled",
    "10": "times to the first token and between tokens of requests that arrive at random, at 70% of the rate of line 2",
    "11": "the first token of the second turn of a chat, over that of the first turn",
    "12": "lines 1, 2 and 6 with `reproducible=True`, over what they are without",
    "13": "lines 1 and 2 where requests have penalties or ask for log-probabilities, over what they are without",
    "14": "requests that a grammar restricts, beside free ones in the engine of line 2 and alone",
    "15": "first tokens in a session of an agent, whose prompt grows from turn to turn",
}
# A row of the table in README.md: what was measured, where and in which unit, and the key of the figure.
IN_README = (
    ("queue of 512 requests, plain decoding", "64 rows, tokens/s", "1"),
    ("queue of 512 requests, EAGLE head, 4 drafts", "64 rows, tokens/s", "2"),
    ("round of one request, EAGLE head, 4 drafts", "engine of 64 rows, ms", "6"),
)


def section(figures: Mapping[str, Figure]) -> str:
    """The section "Serving" of docs/results/performance.md."""
    columns = ("line", "what", "", "vLLM 0.26", "goal", "beyond", "measured", "verdict", "measured on")
    parts = [
        "## Serving",
        paragraph("""`python -m benchmarks.engine.serving`: requests are given to an engine, and times are taken from
        outside. A queue is 8 requests per row, all there at the start; for rates, more is better. Drafts are four of an
        EAGLE head, with synthetic acceptance. All engines but those of line 12 have `reproducible=False`. vLLM's figures
        are of the same kind of card and are written down in `benchmarks/engine/serving.py`: no run in
        `benchmarks/results/` measured them, and there is one for both engines of line 4. "Beyond" is the stretch goal."""),
        table(columns, map(_cells, sorted(figures.values(), key=_line))),
        paragraph(f"""Over 64 rows, {_calls("plain decoding", figures["1"])}; {_calls("an EAGLE head", figures["2"])}. The
        host's time is that in which it does not wait for the device."""),
    ]
    missing = unmeasured(figures)
    if missing:
        parts.append("These lines have not been measured:")
        parts.append("\n".join(paragraph(f"**{key}**: {MEASURES[key]}", bullet=True) for key in missing))
    return "\n\n".join(parts)


def readme(figures: Mapping[str, Figure]) -> str:
    """What the section "Speed" of README.md says of serving."""
    with_goals = [figure for figure in figures.values() if figure.goal is not None]
    beside_vllm = [figure for figure in figures.values() if "vllm" in figure.details]
    short, behind = sum(figure.is_short for figure in with_goals), sum(map(is_behind_vllm, beside_vllm))
    missing = unmeasured(figures)
    text = f"""Serving is timed from outside of the engine, and stands beside what vLLM 0.26 reaches on the same kind of
    card. The table has {len(IN_README)} of its figures. Of all that have goals, {short} of {len(with_goals)} are short
    of them; of all that have a figure of vLLM, {behind} of {len(beside_vllm)} are behind it
    ([every figure](docs/results/performance.md#serving))."""
    if missing:
        text += f" Not measured yet: {'; '.join(MEASURES[key] for key in missing)}."
    rows = []
    for what, where, key in IN_README:
        figure = figures[key]
        short_by = figure.verdict.removeprefix("short by ") if figure.is_short else "met"
        rows.append(
            (what, where, *map(_mark, (figure.details.get("vllm"), figure.goal)), shown(figure.measured), short_by)
        )
    return "\n\n".join([paragraph(text), table(("", "", "vLLM 0.26", "goal", "measured", "short by"), rows)])


def unmeasured(figures: Iterable[str]) -> list[str]:
    """The keys of ``MEASURES`` that have no figure among these."""
    known = list(figures)
    return [
        key for key in MEASURES if not any(known_key == key or known_key.startswith(f"{key}, ") for known_key in known)
    ]


def is_behind_vllm(figure: Figure) -> bool:
    """Whether vLLM reaches more tokens per second, or takes less time; there has to be a figure of vLLM."""
    vllm = figure.details["vllm"]
    return figure.measured < vllm if figure.details["more_is_better"] else figure.measured > vllm


def _line(figure: Figure) -> int:
    return figure.details["line"]


def _cells(figure: Figure) -> Sequence:
    compared = map(_mark, (figure.details.get("vllm"), figure.goal, figure.stretch))
    what = _line(figure), figure.details["what"], figure.details["unit"]
    return *what, *compared, shown(figure.measured), figure.verdict or "-", figure.measured_on


def _mark(x: float | None) -> str:
    """A number of the source code, as short as it was written."""
    return "-" if x is None else f"{x:,g}"


def _calls(what: str, figure: Figure) -> str:
    more = figure.details
    return f"""{what} has {more["rows_per_call"]:.1f} rows in a call on average, {more["tokens_per_round"]:.2f} tokens
    of a row in a round, and {more["host_ms_per_call"]:.2f} ms of the host's time in a call"""
