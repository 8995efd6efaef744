"""A plot of a run: tokens and requests over time, and the distributions of latencies."""

import importlib.util
import pathlib
from collections.abc import Sequence

from jspec._validation import require
from jspec.bench.figures import Figures, concurrency, tokens_by_second
from jspec.bench.responses import Response

FORMATS = (".png", ".svg", ".pdf")


def check_plot(file: pathlib.Path):
    """Check before the run that its plot can be drawn.

    Raises:
      ValueError: matplotlib is not installed, the folder does not exist, or the format is unknown.
    """
    require(file.suffix in FORMATS, "plot", str(file), f"a file whose name ends with {', '.join(FORMATS)}")
    require(file.absolute().parent.is_dir(), "plot", str(file), "a file in a folder that exists")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"plot={str(file)!r}: expected matplotlib, which pip install 'jspec[bench]' installs")


def plot(file: pathlib.Path, title: str, responses: Sequence[Response], figures: Figures):
    """Write a plot of the run to a file."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(11, 7), layout="constrained")
    picture.suptitle(title)
    (rate, under_way), (long, short) = picture.subplots(2, 2)
    by_second = tokens_by_second([response for response in responses if not response.error])
    rate.stairs(by_second, range(len(by_second) + 1), fill=True)
    rate.set(xlabel="seconds", ylabel="new tokens per second")
    began = min(response.sent for response in responses)
    changes = concurrency(responses)
    under_way.step([now - began for now, _ in changes], [count for _, count in changes], where="post")
    under_way.set(xlabel="seconds", ylabel="requests under way")
    for axes, names in ((long, ("ttft", "e2el")), (short, ("tpot", "itl"))):
        drawn = [name for name in names if figures.times[name]]
        for name in drawn:
            axes.ecdf(figures.times[name], label=name.upper())
        axes.set(xlabel="milliseconds", ylabel="share that is at most as long")
        if drawn:
            axes.legend()
    for axes in (rate, under_way, long, short):
        axes.grid(alpha=0.3)
    picture.savefig(file, dpi=110)
