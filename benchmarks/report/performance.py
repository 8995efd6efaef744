"""docs/results/performance.md and the tables of times in other documents, written from the results of
``benchmarks.rounds.round``, ``benchmarks.kernels.verify``, ``benchmarks.engine.serving``, ``benchmarks.engine.http``,
``benchmarks.rounds.mixtures``, ``benchmarks.kernels.experts`` and ``benchmarks.rounds.efficiency`` on one kind of card."""

import dataclasses
import re
from collections.abc import Callable, Sequence

from benchmarks.report import http_table, mixtures_table, results, serving_table
from benchmarks.report.markdown import paragraph, scientific, table
from benchmarks.report.results import Figure, Result
from benchmarks.rounds import budget, efficiency
from jspec.config import QUANTIZATIONS

CARD = "NVIDIA H200"
SHAPE = "llama-3.1-8b"
BATCHES = ("1", "16", "64")
RULES = ("match", "rejection", "block")
# A row of the table in README.md: what was measured, how its figures differ, and the keys of these figures.
IN_README = (
    ("plain decoding", "batch 1 / 16 / 64", ("1", "3, batch 16", "3, batch 64")),
    ("plain decoding, int8 / fp8 weights", "batch 1", ("15, int8", "15, fp8")),
    ("verify pass, 5 / 8 query tokens a row", "batch 1", ("2, T = 5", "2, T = 8")),
    ("verify pass, 5 query tokens a row", "batch 16 / 64", ("4", "6")),
    ("the same, 512 live slots of 4,096", "batch 16", ("5",)),
    ("round with an EAGLE head, 4 drafts", "batch 1 / 16 / 64", tuple(f"9, batch {B}" for B in BATCHES)),
    ("round with a 1B draft model, 4 drafts", "batch 1 / 16 / 64", tuple(f"10, batch {B}" for B in BATCHES)),
    ("round with an EAGLE-3 head, 4 drafts", "batch 1", ("11",)),
    ("round with a DSpark head, 7 drafts", "batch 1 / 16", ("16, batch 1", "16, batch 16")),
    ("EAGLE head, 32,768 draft tokens", "batch 1 / 16 / 64", tuple(f"17, batch {B}" for B in BATCHES)),
    ("the same, head in int8", "batch 1 / 16 / 64", tuple(f"18, batch {B}" for B in BATCHES)),
    ("1B draft model in int8, 32,768 draft tokens", "batch 1 / 16 / 64", tuple(f"19, batch {B}" for B in BATCHES)),
)
RULES_IN_README = tuple(
    (f"verification by `{rule}`, in us", "batch 1 / 16 / 64", tuple(f"{rule}, B = {B}" for B in BATCHES))
    for rule in RULES
)
TERMS = (
    """The **floor** of a pass is the time in which its weights can be read once at the rate at which this card reads memory,
    or the time of its products at 790 TFLOP/s if that is longer, and the time in which the live keys and values can be read
    once. The floor of verification is the time in which its logits can be read once.""",
    """The **goal** is what this project wants to reach, the **stretch goal** what would be better than that. "beyond" means
    that the stretch goal is reached.""",
    """Rounds with drafts have **synthetic acceptance**: random models never agree, so each draft is accepted with
    probability
    0.7 if those before it were accepted.""",
)


@dataclasses.dataclass(frozen=True)
class Measurements:
    """What was measured last on the card.

    Attributes:
      rounds: figures of ``benchmarks.rounds.round`` by key.
      verification: figures of ``benchmarks.kernels.verify`` by key.
      serving: figures of ``benchmarks.engine.serving`` by key.
      http: figures of ``benchmarks.engine.http`` by key.
      mixtures: figures of ``benchmarks.rounds.mixtures`` by key.
      mixtures_served: results of ``benchmarks.engine.serving`` for shapes with experts.
      layers: results of ``benchmarks.kernels.experts``.
      budgets: results of ``benchmarks.rounds.budget``.
      costs: what rounds with an EAGLE-3 head cost by batch and number of drafts.
      quantization: figures of ``benchmarks.rounds.quantization`` by key; the distribution was measured on any device.
    """

    rounds: dict[str, Figure]
    verification: dict[str, Figure]
    serving: dict[str, Figure]
    http: dict[str, Figure]
    mixtures: dict[str, Figure]
    mixtures_served: list[Result]
    layers: list[Result]
    budgets: list[Result]
    costs: efficiency.Costs
    quantization: dict[str, Figure]


def measurements() -> Measurements:
    """Of the files in ``benchmarks/results``."""
    rounds, served, over_http = (
        [run for run in results.read_all(name, CARD) if run.settings["shape"] == SHAPE]
        for name in ("round", "serving", "http")
    )
    costs = [run for run in costs_by_method()["eagle3"] if run.settings["shape"] == SHAPE]
    verification = results.latest(results.read_all("verify", CARD))
    quantization = results.latest(results.read_all("quantization"))
    return Measurements(
        results.latest(rounds),
        verification,
        results.latest(served),
        results.latest(over_http),
        results.latest(results.read_all("mixtures", CARD)),
        [run for run in results.read_all("serving", CARD) if run.settings["shape"] != SHAPE],
        results.read_all("experts", CARD),
        results.read_all("budget", CARD),
        efficiency.costs_of(costs),
        quantization,
    )


def costs_by_method() -> dict[str, list[Result]]:
    """The results of ``benchmarks.rounds.efficiency`` on the card by drafting method, the earliest first."""
    by_method: dict[str, list[Result]] = {}
    for run in results.read_all("efficiency", CARD):
        by_method.setdefault(run.settings["method"], []).append(run)
    return by_method


def readme(measured: Measurements) -> str:
    """The section "Speed" of README.md, without its heading."""
    figures = measured.rounds | measured.verification
    shown = [figures[key] for *_, keys in (*IN_README, *RULES_IN_README) for key in keys]
    short = sum(figure.is_short for figure in shown)
    even = {(batch, K): f"{measured.costs.break_even(batch, K):.2f}" for batch in ("1", "64") for K in ("1", "4")}
    rows = [*_grouped(figures, IN_README, 2), *_grouped(figures, RULES_IN_README, 1)]
    introduction = f"""Llama-3.1-8B shape in bf16, random weights, one {CARD}. The floor is the time in which weights
    and live cache
    can be read once, or the products made if that takes longer. The goal is what this project wants to reach: {short} of
    these {len(shown)} figures are short of it. Times are in milliseconds, those of verification in microseconds."""
    more = f"""Every line of the benchmark, the run that it was measured in and its command:
    [docs/results/performance.md](docs/results/performance.md); what was tried to get nearer:
    [benchmarks/LOG.md](benchmarks/LOG.md).
    The wall time of `generate` at batch 1 differs by {figures["13"].measured:.2f}% from the time of its rounds on the
    device: they run as one CUDA graph, and the host stays a call behind."""
    pays = f"""Speculation pays only if enough drafts are accepted. Four drafts of an EAGLE-3 head give more tokens per
    second than plain decoding from an acceptance length of {even["1", "4"]} on at batch 1 and of {even["64", "4"]} at batch
    64; one draft does from {even["1", "1"]} and {even["64", "1"]}
    ([every batch and number of drafts](docs/results/efficiency-{measured.costs.method}.md))."""
    columns = ("", "", "floor", "goal", "measured", "short by")
    parts = [paragraph(introduction), table(columns, rows), paragraph(more), paragraph(pays)]
    return "\n\n".join([*parts, serving_table.readme(measured.serving)])


def document(found: Measurements) -> str:
    """docs/results/performance.md."""
    groups = found.rounds, found.verification, found.serving, found.http, found.mixtures
    figures = [one for group in groups for one in group.values()]
    runs: list[Result] = []
    every = [*(one.result for one in figures), *found.mixtures_served, *found.layers, *found.budgets[-1:]]
    for one in sorted(every, key=lambda one: one.date):
        if one not in runs:
            runs.append(one)
    short = [one for one in figures if one.is_short]
    compared = ("floor", "goal", "measured", "against the goal", "measured on")
    of_rounds = ("line", "what", "", "floor", "goal", "stretch goal", "measured", "over floor", *compared[3:])
    of_runs = ("date", "command", "commit", "jax", "Python", "driver", "transcribed from")
    parts = [
        "# Decode rounds, verification and serving beside their floors and goals",
        paragraph(f"""Written by `python -m benchmarks.tables` from [`benchmarks/results/`](../../benchmarks/results),
        which also
        has launches, versions and commands. All figures are of one {CARD} and random weights, of the Llama-3.1-8B
        shape and in bfloat16 where nothing else is said."""),
        "\n".join(paragraph(text, bullet=True) for text in TERMS),
        paragraph(f"""{len(short)} figures are short of their goals. What was tried on them is in
        [benchmarks/LOG.md](../../benchmarks/LOG.md)."""),
        "## Decode rounds and verify passes",
        paragraph("""`python -m benchmarks.rounds.round`. A verify pass is written as rows of the batch x query tokens of
        each row. Lines 7 and 8 are those of verification, below."""),
        table(of_rounds, _round_lines(found.rounds)),
        "## Verification",
        paragraph("""`python -m benchmarks.kernels.verify --only time`, in microseconds: four drafts, logits in bfloat16
        over 128,256 tokens, B rows. "All filters" are top-k, top-p and min-p, on the distributions of target and draft."""),
        table(("rule", "", *compared), _rule_lines(found.verification)),
        "The kernels that the rules are made of have no goals of their own:",
        table(("kernel", "", "floor", "measured", "measured on"), _kernel_lines(found.verification)),
        serving_table.section(found.serving),
        http_table.section(found.http),
        mixtures_table.section(found.mixtures, found.mixtures_served, found.layers),
        budget.section(found.budgets),
        "## The runs",
        table(of_runs, map(_run_cells, runs)),
        paragraph("""A "+" after a commit says that the code differed from it, a "-" that something is not known.
        Figures that
        were transcribed have been rounded, and their source did not name a commit for each of them; the notes in their files
        say what is known. Where a commit was entered after its run, the note says that, too.
        Commands are those of their commits; benchmarks have been sorted into folders since then."""),
    ]
    return "\n\n".join(parts) + "\n"


def quantized_distribution(found: Measurements) -> str:
    """The table in docs/guides/quantization.md of how far quantised weights move the distribution."""
    rows = []
    for kind in QUANTIZATIONS:
        more = found.quantization[f"kl, {kind}"].details
        rows.append((kind, *(scientific(more[name]) for name in ("mean_kl", "max_kl")), f"{more['top1']:.1%}"))
    return table(("", "mean KL", "largest", "top-1 agreement"), rows)


def quantized_speed(found: Measurements) -> str:
    """The paragraph on speed in docs/guides/quantization.md."""
    rounds, passes = found.rounds, found.quantization
    int8, fp8, plain = (rounds[key] for key in ("15, int8", "15, fp8", "1"))
    fp8_pass, int8_pass, wide = (
        passes[f"8 layers, 16 x 5, {kind}"].measured / 1e3 for kind in ("fp8", "int8", "bfloat16")
    )
    return paragraph(f"""**Speed**: a token of the Llama-3.1-8B shape at batch 1 takes {int8.measured:.2f} ms with
    int8 weights
    and {fp8.measured:.2f} with fp8 on one {CARD}, {plain.measured:.2f} in bf16 (`python -m benchmarks.rounds.round
    --lines 15 1`; the floor is {int8.floor:.2f}, the goal {int8.goal:.1f}). A verify pass over 80 query tokens, 16 rows
    of 5, takes {int8_pass:.1f} ms with int8, {fp8_pass:.1f} with fp8 and {wide:.1f} in bf16, for 8 layers and the output
    head (`python -m benchmarks.rounds.quantization`).""")


def _grouped(figures: dict[str, Figure], rows: Sequence[tuple[str, str, tuple[str, ...]]], digits: int):
    """Cells of a table with several figures in a row of it."""
    for what, which, keys in rows:
        group = [figures[key] for key in keys]
        each: list[Callable[[Figure], str]] = [
            lambda figure: f"{figure.floor:.{digits}f}",
            lambda figure: f"{figure.goal:g}" if digits == 1 else f"{figure.goal:.{digits}f}",
            lambda figure: f"{figure.measured:.{digits}f}",
            lambda figure: f"{100 * (figure.measured / figure.goal - 1):.0f}%" if figure.is_short else "met",
        ]
        yield what, which, *(" / ".join(_joined([show(figure) for figure in group])) for show in each)


def _natural(figure: Figure) -> list[tuple[int, str]]:
    """For sorting by key: numbers in it by their size, and before words."""
    return [(int(part), "") if part.isdigit() else (10**9, part) for part in re.findall(r"\d+|\D+", figure.key)]


def _joined(cells: list[str]) -> list[str]:
    return cells[:1] if len(set(cells)) == 1 else cells


def _round_lines(figures: dict[str, Figure]):
    for figure in sorted(figures.values(), key=_natural):
        unit = figure.details["unit"]
        measured = f"{figure.measured:.{3 if unit in ('ms', 'x') else 2}f}"
        numbers = (f"{x:.2f}" if x is not None else "-" for x in (figure.floor, figure.goal, figure.stretch))
        ratio = f"{figure.measured / figure.floor:.2f}" if figure.floor and unit == "ms" else "-"
        what = figure.details["line"], figure.details["what"], unit
        yield *what, *numbers, measured, ratio, figure.verdict or "-", figure.measured_on


def _rule_lines(figures: dict[str, Figure]):
    for figure in figures.values():
        rule, *rest = figure.key.split(", ", 1)
        if rule in RULES:
            floor = "-" if figure.floor is None else f"{figure.floor:.1f}"
            goal = "-" if figure.goal is None else f"{figure.goal:g}"
            yield f"`{rule}`", *rest, floor, goal, f"{figure.measured:.1f}", figure.verdict or "-", figure.measured_on


def _kernel_lines(figures: dict[str, Figure]):
    for figure in figures.values():
        op, rest = figure.key.split(", ", 1)
        if op not in RULES and not op.startswith("check"):
            yield (
                op,
                rest,
                "-" if figure.floor is None else f"{figure.floor:.1f}",
                f"{figure.measured:.1f}",
                figure.measured_on,
            )


def _run_cells(run: Result):
    versions = (run.versions.get(name) or "-" for name in ("jax", "python", "driver"))
    return run.day, f"`{run.command}`", run.code, *versions, f"`{run.source}`" if run.source else ""
