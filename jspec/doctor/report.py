"""Prints a diagnosis."""

from rich.console import Console
from rich.table import Table

from jspec.doctor.diagnosis import Diagnosis


def show(diagnosis: Diagnosis, console: Console | None = None):
    """Print a diagnosis: its checks, its measurements, and the verdict as the last line."""
    console = console or Console(highlight=False)
    colours = {"ok": "green", "note": "cyan", "warning": "yellow", "wrong": "red"}
    table = Table(box=None, show_header=False)
    for check in diagnosis.checks:
        table.add_row(f"[{colours[check.status]}]{check.status}[/]", check.name, check.detail)
    console.print(table)
    if diagnosis.served is not None:
        measured = Table(box=None)
        for heading in ("greedy", "acceptance length", "by position"):
            measured.add_column(heading, justify="right" if heading == "acceptance length" else "left")
        rows = [("served", diagnosis.served), *((trial.label, trial.stats) for trial in diagnosis.trials)]
        for label, stats in rows:
            rates = "  ".join(f"{rate:.2f}" for rate in stats.acceptance_rate_per_position)
            measured.add_row(label, f"{stats.mean_acceptance_length:.2f}", rates)
        console.print(measured)
    for cost in diagnosis.rounding:
        console.print(f"rounding: {cost}")
    for product in diagnosis.products:
        console.print(f"product: {product}", markup=False, soft_wrap=True)
    colour = "green" if diagnosis.healthy else "red"
    console.print(f"[bold {colour}]{diagnosis.verdict.replace('_', ' ')}[/]: {diagnosis.explanation}")
