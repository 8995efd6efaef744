"""Prints a diagnosis or a comparison, and makes a report of them that can be pasted into a bug."""

import hashlib
import importlib.metadata
import platform
from collections.abc import Iterator

import jax
from rich.console import Console
from rich.table import Table

import jspec
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.json_files import MAX_BYTES
from jspec.doctor.comparison import Comparison
from jspec.doctor.diagnosis import Diagnosis
from jspec.doctor.exact import Exactness
from jspec.doctor.figures import Texts
from jspec.outputs import Stats

PACKAGES = ("jax", "jaxlib", "transformers", "torch")
COLUMNS = ("prompt", "tokens", "largest", "relative", "KL mean", "KL max", "top-1 differs", "greedy text")


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


def show_comparison(comparison: Comparison, console: Console | None = None):
    """Print a comparison: the figures of each prompt, and the result as the last line."""
    console = console or Console(highlight=False)
    table = Table(box=None)
    for heading in COLUMNS:
        table.add_column(heading, justify="left" if heading == "greedy text" else "right")
    for index, text in enumerate(comparison.texts):
        table.add_row(*_row(index, text, comparison))
    console.print(table)
    if comparison.on_texts is not None:
        console.print(*comparison.on_texts.sentences, sep="\n", markup=False, soft_wrap=True)
    word, colour = ("equal", "green") if comparison.equal else ("different", "red")
    console.print(f"[bold {colour}]{word}[/]: ", end="")
    console.print(f"{comparison.explanation}.", markup=False)


def show_exactness(found: Exactness, console: Console | None = None):
    """Print what differs in each way, and what that comes to in all as the last line."""
    console = console or Console(highlight=False)
    table = Table(box=None)
    for heading in ("compared with plain, one by one", "texts", "log-probabilities", "bits", "promised"):
        table.add_column(heading, justify="left" if heading[0] == "c" else "right")
    for one in found.differences:
        texts = f"{one.texts} of {one.of_texts}" if one.of_texts else ""
        numbers = f"{one.numbers} of {one.of_numbers}", str(one.bits)
        table.add_row(one.name, texts, *numbers, "yes" if one.promised else "no")
    console.print(table)
    if found.kernel is not None:
        console.print(f"first: {found.kernel}", markup=False, soft_wrap=True)
    if not all(one.promised for one in found.differences):
        console.print(f"not promised: {found.summary(False)}", soft_wrap=True)
    colour, word = ("green", "exact") if found.exact else ("red", "different")
    console.print(f"[bold {colour}]{word}[/]: {found.summary(True)}", soft_wrap=True)


def bug_report(comparison: Comparison, diagnosis: Diagnosis | None = None, draft: Folder | None = None) -> str:
    """A comparison, and what was measured of the draft, as text with neither prompts nor paths.

    Args:
      comparison: of the target.
      diagnosis: of the draft, None if none was measured.
      draft: the draft's folder, None if there is none.
    """
    return "\n".join(_lines(comparison, diagnosis, draft)) + "\n"


def _lines(comparison: Comparison, diagnosis: Diagnosis | None, draft: Folder | None) -> Iterator[str]:
    yield f"jspec doctor --reference: {'equal' if comparison.equal else 'DIFFERENT'}"
    versions = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    yield f"versions: jspec {jspec.__version__}, {versions}, Python {platform.python_version()}"
    devices = jax.devices()
    yield f"device: {len(devices)} x {devices[0].device_kind} ({jax.default_backend()}); reference: cpu"
    quantized = comparison.target.target_config.formats
    kind = f"{quantized} and {comparison.dtype}" if quantized else comparison.dtype
    yield f"target: {_checkpoint(comparison.target.folder)}, computed in {kind}"
    yield f"reference: {_checkpoint(comparison.reference)}, computed in {comparison.reference_dtype}"
    if draft is not None:
        yield f"draft: {_checkpoint(draft)}"
    yield f"tolerance: {comparison.tolerance}"
    yield ""
    rows = [COLUMNS, *(_row(index, text, comparison, decode=False) for index, text in enumerate(comparison.texts))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)) + f"  {row[-1]}"
    yield ""
    yield f"{comparison.explanation}."
    if not comparison.equal and comparison.layers:
        yield "hidden states of prompt 0, relative difference by layer from the embeddings on:"
        yield "  " + " ".join(f"{layer.relative:.1e}" for layer in comparison.layers)
    if diagnosis is not None:
        yield f"acceptance: {diagnosis.verdict.replace('_', ' ')}: {diagnosis.explanation}"
    if diagnosis is not None and diagnosis.served is not None:
        yield f"  served: {_acceptance(diagnosis.served)}"
        yield from (f"  {trial.label}: {_acceptance(trial.stats)}" for trial in diagnosis.trials)


def _row(index: int, text: Texts, comparison: Comparison, decode: bool = True) -> tuple[str, ...]:
    differs = f"{len(text.top1_differs)} of {text.positions}"
    if text.top1_differs:
        differs += f", first at {text.top1_differs[0]}"
    figures = (f"{value:.1e}" for value in (text.max_absolute, text.max_relative, text.mean_kl, text.max_kl))
    return (str(index), f"{text.prompt_length}+{text.length}", *figures, differs, _text(text, comparison, decode))


def _text(text: Texts, comparison: Comparison, decode: bool) -> str:
    """Where a greedy text differs: the place, both tokens, and by how much either side prefers the reference's."""
    found = text.difference
    if found is None:
        return f"the same {text.length} tokens"
    theirs, ours = (_token(token, comparison, decode) for token in (found.expected, found.ours))
    margins = "" if found.margin is None else f"; margin {found.margin:.2g} there, {found.own_margin:.2g} here"
    return f"token {found.index}: {theirs} there, {ours} here{margins}"


def _token(token: int | None, comparison: Comparison, decode: bool) -> str:
    if token is None:
        return "the end"
    tokenizer = comparison.target.tokenizer if decode else None
    return str(token) if tokenizer is None else f"{token} {tokenizer.decode([token], skip_special_tokens=False)!r}"


def _acceptance(stats: Stats) -> str:
    rates = " ".join(f"{rate:.2f}" for rate in stats.acceptance_rate_per_position)
    return f"acceptance length {stats.mean_acceptance_length:.2f}, by position {rates}"


def _checkpoint(folder: Folder) -> str:
    """Class, revision and digest of a checkpoint's config.json."""
    content = folder.read("config.json", MAX_BYTES)
    names = folder.json("config.json").get("architectures")
    revision = "" if folder.revision is None else f", commit {folder.revision[:12]}"
    listed = ", ".join(map(str, names)) if isinstance(names, list) else "no architectures"
    return f"{listed}, config.json {hashlib.sha256(content).hexdigest()}{revision}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
