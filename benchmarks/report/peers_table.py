"""docs/results/beside-vllm.md and the table in README.md: written from the results of ``benchmarks.peers``."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.peers.rows import BATCHES, ROWS, SMOKE
from benchmarks.report.markdown import paragraph, table
from benchmarks.report.results import Result

SIDES = "vLLM", "jspec"
UNEQUAL = (
    """vLLM is timed by the wall clock between what two of its steps return, its scheduler included, with the graphs and
    the compilation that it has by default. jspec is timed as one compiled program of many rounds, without the host of
    its engine, which runs a call behind the device.""",
    """Drafts: four a round, each accepted with probability 0.7 if those before it were, on both sides. vLLM's are its
    likeliest tokens, jspec's are sampled. vLLM's MTP layer has logits of all 248,320 tokens, jspec's of 32,000.""",
    """Activations: where published checkpoints of a format ask for rounded ones (FP8, FP8 in blocks, NVFP4), vLLM rounds
    them if it has a kernel for that on the card. jspec rounds none in these rows.""",
    """Weights are random on both sides, but not the same: vLLM's are those of its dummy loader. So tokens go through
    other experts; the floors count those that jspec's tokens went through.""",
    """Which kernels vLLM takes depends on what is installed beside it, such as FlashInfer and DeepGEMM.""",
)


def key_of(row: str, rows: int, side: str) -> str:
    """The key of a figure in the result: of so many rows of ``ROWS[row]``."""
    return f"{row}, {rows} rows, {side}"


def document(runs: Sequence[Result]) -> str:
    """docs/results/beside-vllm.md, from all results, the earliest first."""
    parts = [
        "# Beside vLLM",
        paragraph("""Written by `python -m benchmarks.tables` from [`benchmarks/results/`](../../benchmarks/results).
        Milliseconds of a decode round of 1 / 16 / 64 rows in vLLM and in jspec, measured in turn on one card, with the
        same shapes and formats of weights. A round without drafts gives each row one token. "Tokens" are those of the
        prompt and those that follow. The floor is the time in which the weights, the live cache and states can be read
        once, or the products made if that takes longer. The lead is vLLM's time over jspec's: above 1 jspec is faster.
        A "-" says that there is no figure."""),
    ]
    for card, measured in by_card(runs).items():
        parts += [f"## {card}", section(measured)]
    parts += [
        "## What is not equal on both sides",
        "\n".join(paragraph(text, bullet=True) for text in UNEQUAL),
        "## On your own card",
        paragraph("""vLLM needs an environment of its own, of any version that has its V1 engine; rows with drafts need
        its synthetic acceptance. `--rows` and `--batches` choose what is measured, and a side that fails or has no room
        is named with its reason. This page then has a table of your card, and the README's table is of it."""),
        "```console\n$ python -m venv DIR && DIR/bin/pip install vllm\n"
        "$ python -m benchmarks.peers --vllm-python DIR/bin/python\n```",
    ]
    return "\n\n".join(parts) + "\n"


def readme(runs: Sequence[Result]) -> str:
    """The table of README.md, of the card that was measured last."""
    card, measured = next(iter(by_card(runs).items()))
    found = newest(measured)
    leads = [lead for name, run in found.items() for lead in numbers(run, name)[-1] if lead is not None]
    text = f"""The same shapes in vLLM and in jspec, in turn on one {card}: milliseconds of a decode round of 1 / 16 / 64
    rows. Of {len(leads)} pairs of figures jspec is ahead in {sum(lead > 1 for lead in leads)}. Versions, floors, what is
    not equal on both sides, and the command for your own card:
    [docs/results/beside-vllm.md](docs/results/beside-vllm.md)."""
    rows = [(title, *compared) for title, _, _, *compared, _ in lines(found)]
    return "\n\n".join([paragraph(text), table(("", "vLLM", "jspec", "lead"), rows)])


def section(runs: Sequence[Result]) -> str:
    """The table of one card, and what is to be said of it."""
    found, of_runs = newest(runs), ("date", "command", "commit", "vLLM", "torch", "jax", "driver")
    shown = [run for run in runs if run in found.values()]
    reasons = [paragraph(text, bullet=True) for name, run in found.items() for text in _reasons(run, name)]
    notes = [paragraph(f"{run.day}: {run.note}", bullet=True) for run in shown if run.note]
    parts = [table(("", "tokens", "floor", "vLLM", "jspec", "lead", "measured on"), lines(found))]
    parts += ["Not measured:", "\n".join(reasons)] if reasons else []
    return "\n\n".join([*parts, table(of_runs, map(_run_cells, shown)), *(["\n".join(notes)] if notes else [])])


def by_card(runs: Sequence[Result]) -> dict[str, list[Result]]:
    """The results of each kind of card, that of the last run first."""
    kinds = dict.fromkeys(run.device["kind"] for run in reversed(runs))
    return {kind: [run for run in runs if run.device["kind"] == kind] for kind in kinds}


def newest(runs: Iterable[Result]) -> dict[str, Result]:
    """Row -> the last run that has it, in the order of the table. Both sides are of one run, and so of one machine."""
    found = {key.partition(", ")[0]: run for run in runs for key in (*run.measured, *run.settings["reasons"])}
    return {name: found[name] for name in (*ROWS, *SMOKE) if name in found}


def numbers(run: Result, name: str) -> tuple[list[float | None], ...]:
    """Floors, vLLM's milliseconds, jspec's, and the leads, for each number of rows."""
    counts = run.settings["batches"]
    floors = [run.floors.get(key_of(name, rows, "jspec")) for rows in counts]
    theirs, ours = ([run.measured.get(key_of(name, rows, side)) for rows in counts] for side in SIDES)
    return floors, theirs, ours, [a and b and a / b for a, b in zip(theirs, ours, strict=True)]


def lines(found: Mapping[str, Result]) -> Iterator[tuple[str, ...]]:
    """The cells of each row, of the run that it is of."""
    for name, run in found.items():
        row, counts = {**ROWS, **SMOKE}[name], run.settings["batches"]
        where = "" if tuple(counts) == BATCHES else f", {' / '.join(map(str, counts))} rows"
        cells = (" / ".join(map(_shown, group)) for group in numbers(run, name))
        measured_on = f"{run.day}, {run.code}" if run.commit else run.day
        yield f"{row.title}{where}", f"{row.prompt:,} + {row.new}", *cells, measured_on


def _reasons(run: Result, name: str) -> Iterator[str]:
    """Why sides of a row were not measured."""
    for side in SIDES:
        reasons = run.settings["reasons"].get(f"{name}, {side}", {})
        for reason in dict.fromkeys(reasons.values()):
            rows = " / ".join(rows for rows, given in reasons.items() if given == reason)
            yield f"{name}, {side}, {rows} rows: {reason}"


def _shown(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}"


def _run_cells(run: Result) -> tuple[str, ...]:
    versions = (run.versions.get(name) or "-" for name in ("vllm", "torch", "jax", "driver"))
    return run.day, f"`{run.command}`" if run.command else "-", run.code, *versions
