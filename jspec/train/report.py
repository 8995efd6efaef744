"""What a run leaves behind for people: losses.csv, losses.png and figures.json."""

import csv
import json
import math
import pathlib
import platform
from collections.abc import Mapping

import jax

import jspec
from jspec.results import Stats
from jspec.train.loop import TrainingProgress

LOG, PLOT, FIGURES = "losses.csv", "losses.png", "figures.json"
FIELDS = ("step", "seconds", "train_loss", "held_out_loss")


class Log:
    """losses.csv: a row per evaluation, losses in nats and the served acceptance length at each temperature.

    Args:
      folder: where it lies.
      temperatures: of the acceptance lengths.
      after: rows of later steps are dropped: those of a run that goes on from this step are written again.
    """

    def __init__(self, folder: pathlib.Path, temperatures: tuple[float, ...], after: int = -1):
        self.file, self._temperatures = folder / LOG, temperatures
        self._lengths = [f"acceptance_length_t{temperature:g}" for temperature in temperatures]
        self._fields = [*FIELDS, *self._lengths]
        kept = [row for row in self.rows() if int(row["step"]) <= after] if self.file.exists() else []
        with self.file.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._fields, lineterminator="\n")
            writer.writeheader()
            writer.writerows(kept)

    def add(self, progress: TrainingProgress, served: Mapping[float, Stats]) -> str:
        """Append one row, and return it for people to read; a loss that is NaN stays empty."""
        values = [str(progress.step), f"{progress.seconds:.2f}"]
        values += ["" if math.isnan(x) else f"{x:.6g}" for x in (progress.train_loss, progress.held_out_loss)]
        values += [f"{served[temperature].mean_acceptance_length:.4f}" for temperature in self._temperatures]
        with self.file.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(values)
        return "  ".join(f"{name} {value or '-'}" for name, value in zip(self._fields, values, strict=True))

    def rows(self) -> list[dict[str, str]]:
        with self.file.open(newline="") as file:
            return list(csv.DictReader(file))

    def plot(self, title: str):
        """losses.png beside it: losses above, acceptance lengths below, over steps."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, (losses, lengths) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6))
        for axes, columns in ((losses, FIELDS[2:]), (lengths, self._lengths)):
            for column in columns:
                points = [(int(row["step"]), float(row[column])) for row in self.rows() if row[column]]
                axes.plot(*zip(*points, strict=True), marker=".", label=column.replace("_", " "))
            axes.grid(alpha=0.3)
            axes.legend()
        losses.set(title=title, ylabel="nats")
        lengths.set(xlabel="step", ylabel="tokens per pass of the target")
        figure.tight_layout()
        figure.savefig(self.file.with_name(PLOT), dpi=110)
        pyplot.close(figure)


def versions() -> dict[str, str]:
    """What the figures were made with."""
    return {
        "jspec": jspec.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
    }


def write_json(file: pathlib.Path, content: dict):
    """``content``, readable."""
    file.write_text(json.dumps(content, indent=2) + "\n")
