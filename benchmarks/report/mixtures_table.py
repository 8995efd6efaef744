"""How fast mixtures of experts are, in docs/results/performance.md: written from the figures of
``benchmarks.rounds.mixtures``, of ``benchmarks.kernels.experts``, and of ``benchmarks.engine.serving`` for such shapes."""

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.engine.serving import FIRST_TOKENS_GOALS
from benchmarks.report.figures import shown
from benchmarks.report.markdown import paragraph, table
from benchmarks.report.results import Figure, Result


def section(figures: Mapping[str, Figure], served: Sequence[Result], layers: Sequence[Result]) -> str:
    """The section "Mixtures of experts" of docs/results/performance.md.

    Args:
      figures: of ``benchmarks.rounds.mixtures``, by key.
      served: results of ``benchmarks.engine.serving`` for mixtures, the earliest first.
      layers: results of ``benchmarks.kernels.experts``, the earliest first.
    """
    columns = (
        "line",
        "what",
        "experts",
        "tokens a round",
        "floor",
        "goal",
        "beyond",
        "measured",
        "verdict",
        "measured on",
    )
    first = ("shape", "what", "goal", "beyond", "measured, ms", "measured on")
    of_layers = ("a layer of", "tokens", "experts", "floor, us", "measured, us", "over floor", "measured on")
    parts = [
        "## Mixtures of experts",
        paragraph("""`python -m benchmarks.rounds.mixtures`, in milliseconds of a round or a pass. Routers are random and the
        embeddings large, so that tokens are spread over the experts evenly in every layer; "experts" says of how many of a
        layer the weights were read on average. The floor counts these, attention, output head and live cache."""),
        table(columns, map(_cells, sorted(figures.values(), key=lambda figure: figure.key))),
        paragraph("`python -m benchmarks.engine.serving --only 4`: first tokens of prompts that arrive together."),
        table(first, _first_tokens(served)),
        paragraph("""`python -m benchmarks.kernels.experts`: routing and experts of one layer. The floor is that of
        reading the weights of the experts that were hit, or of the products at 790 TFLOP/s if that is longer."""),
        table(of_layers, _layers(layers)),
    ]
    return "\n\n".join(parts)


def _cells(figure: Figure) -> tuple:
    more = figure.details
    tokens = f"{more['tokens']:.2f}" if "tokens" in more else "-"
    numbers = (shown(x) for x in (figure.floor, figure.goal, figure.stretch, figure.measured))
    return (
        more["line"],
        more["what"],
        f"{more['experts']:.1f}",
        tokens,
        *numbers,
        figure.verdict or "-",
        figure.measured_on,
    )


def _first_tokens(served: Sequence[Result]) -> Iterator[tuple]:
    latest = {(run.settings["shape"], key): run for run in served for key in run.measured}
    for (shape, key), run in latest.items():
        number, _, rest = key.partition(", ")
        if number == "4":
            goals = FIRST_TOKENS_GOALS.get(shape, {}).get(int(rest.split()[0]), ("-", "-"))
            yield shape, run.details[key]["what"], *goals, shown(run.measured[key]), f"{run.day}, {run.code}"


def _layers(layers: Sequence[Result]) -> Iterator[tuple]:
    names = {768: "Qwen3-30B-A3B", 2880: "gpt-oss-20b"}
    latest = {run.settings["layer"]["F"]: run for run in layers}
    for width, run in latest.items():
        for key, measured in run.measured.items():
            floor, hit = run.floors[key], run.details[key]["experts"]
            numbers = f"{hit:.1f}", f"{floor:.1f}", f"{measured:.1f}", f"{measured / floor:.2f}"
            yield names[width], key.removesuffix(" tokens"), *numbers, f"{run.day}, {run.code}"
