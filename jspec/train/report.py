"""The files in which a training run reports its results: losses.csv, losses.png and figures.json."""

import csv
import json
import math
import pathlib
import platform
from collections.abc import Mapping

import jax

import jspec
from jspec.outputs import Stats
from jspec.train.loop import TrainingProgress

LOG_FILE, PLOT_FILE, FIGURES_FILE = "losses.csv", "losses.png", "figures.json"
FIELDS = ("step", "seconds", "train_loss", "held_out_loss")


class Log:
    """The file losses.csv, with one entry per evaluation: step, seconds, losses and acceptance lengths.

    The losses are in nats. There is one column with the acceptance length of the served head for each temperature.

    Args:
      folder: the folder of the file; it must exist.
      temperatures: the temperatures at which acceptance is measured.
      resume_step: the step from which the run continues. Entries of later steps are removed from an existing file,
        because the run will write them again. With -1, the default, the file starts empty.
    """

    def __init__(self, folder: pathlib.Path, temperatures: tuple[float, ...], resume_step: int = -1):
        self.file, self._temperatures = folder / LOG_FILE, temperatures
        self._lengths = [f"acceptance_length_t{temperature:g}" for temperature in temperatures]
        self._fields = [*FIELDS, *self._lengths]
        earlier = self.entries() if self.file.exists() else []
        kept = [entry for entry in earlier if int(entry["step"]) <= resume_step]
        with self.file.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._fields, lineterminator="\n")
            writer.writeheader()
            writer.writerows(kept)

    def add(self, progress: TrainingProgress, served: Mapping[float, Stats]) -> str:
        """Append the entry of one evaluation, and return it as a line for the terminal.

        A loss that is NaN is left empty; at step 0, for example, there is no training loss yet.
        """
        values = [str(progress.step), f"{progress.seconds:.2f}"]
        values += ["" if math.isnan(x) else f"{x:.6g}" for x in (progress.train_loss, progress.held_out_loss)]
        values += [f"{served[temperature].mean_acceptance_length:.4f}" for temperature in self._temperatures]
        with self.file.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(values)
        return "  ".join(f"{name} {value or '-'}" for name, value in zip(self._fields, values, strict=True))

    def entries(self) -> list[dict[str, str]]:
        """All entries of the file in order, each from column name to text."""
        with self.file.open(newline="") as file:
            return list(csv.DictReader(file))

    def plot(self, title: str):
        """Draw losses.png beside the file: losses by step in the upper plot, acceptance lengths in the lower."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, (losses, lengths) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6))
        for axes, columns in ((losses, FIELDS[2:]), (lengths, self._lengths)):
            for column in columns:
                points = [(int(entry["step"]), float(entry[column])) for entry in self.entries() if entry[column]]
                axes.plot(*zip(*points, strict=True), marker=".", label=column.replace("_", " "))
            axes.grid(alpha=0.3)
            axes.legend()
        losses.set(title=title, ylabel="nats")
        lengths.set(xlabel="step", ylabel="tokens per pass of the target")
        figure.tight_layout()
        figure.savefig(self.file.with_name(PLOT_FILE), dpi=110)
        pyplot.close(figure)


def versions() -> dict[str, str]:
    """Versions of jspec, JAX and Python, and the kind of device, for figures.json."""
    return {
        "jspec": jspec.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
    }


def write_json(file: pathlib.Path, content: dict):
    """Write ``content`` as indented JSON."""
    file.write_text(json.dumps(content, indent=2) + "\n")
