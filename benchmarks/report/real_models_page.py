"""docs/results/real-models.md, of what ``benchmarks.real.real_models`` measured last of each way, and
``benchmarks.real.greedy`` of each pair."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.real.prompts import KINDS
from benchmarks.real.real_models import ROWS, TEMPERATURES, TIMED_TEMPERATURES
from benchmarks.report import results
from benchmarks.report.markdown import paragraph, table

READ = """Tokens a round are those that a verify pass of the target gives, its own token included: 1.00 without drafts. What
stands behind ± is one standard error: of tokens a round over prompts, of tokens a second over three runs. Tokens a
second are all requests' together, prompts included; in brackets, times those of plain decoding."""


FIRST = """## What to do with such a pair

1. Ask whether the two belong together, and what the drafts are worth on your own texts:
   `jspec doctor --target TARGET --draft DRAFT --prompts FILE` ([the doctor](../guides/doctor.md)).
2. Choose K by how many requests you serve at a time. One request of a model of this size waits for kernels rather than
   for weights, so that a pass of a draft model of a third of its size takes more than half as long as one of its own: one
   or two drafts, or a trained head, whose passes are one layer. From 16 requests on this draft model does not pay.
   `num_draft_tokens="auto"` ([Drafting](../guides/drafting.md)) chooses K while it serves, drafting nothing included; from
   16 requests on, in runs of a second or less, it was up to 15% behind plain decoding here, for reasons that were not
   looked into. Where answers repeat the prompt, `draft="ngram"` needs no second model.
3. Train a head from the target's own answers ([a quarter of an hour](../guides/training.md#a-head-in-a-quarter-of-an-hour)),
   on questions like those that you will get: what it learned of code says little about edits. `eagle3` below is that head,
   and `eagle3-more` the same after [more answers](../guides/training.md#from-another-head)."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target and what drafts for it.

    Attributes:
      names: of the target, and of the draft model or head.
      ways: way -> its figures, as ``benchmarks.real.real_models`` has them.
      last: the run that was the last.
    """

    names: tuple[str, str]
    ways: dict[str, Any]
    last: results.Result


def pairs_of(runs: Sequence[results.Result]) -> list[Pair]:
    """What was measured last of each way of each pair. The results are in order, the earliest first."""
    by_names: dict[tuple[str, str], Pair] = {}
    for run in runs:
        names = run.settings["target"], run.settings["draft"]
        before = by_names[names].ways if names in by_names else {}
        by_names[names] = Pair(names, before | run.measured, run)
    return list(by_names.values())


def markdown(pairs: Sequence[Pair], greedy: Sequence[results.Result] = ()) -> str:
    """The page, of pairs and of what was last measured of greedy texts."""
    plain = {pair.names[0]: pair.ways["plain"]["rates"] for pair in pairs if "plain" in pair.ways}
    equal = {(run.settings["target"], run.settings["draft"]): run for run in greedy}
    sections = [_section(pair, plain.get(pair.names[0], {}), equal.get(pair.names)) for pair in pairs]
    head = """Written by `python -m benchmarks.tables` from [`benchmarks/results/`](../../benchmarks/results); the prompts
    are [sixty of our own](../../benchmarks/real/prompts.jsonl), twenty of each kind."""
    return "\n\n".join(["# Real models", paragraph(head), paragraph(READ), FIRST, *sections]) + "\n"


def _section(pair: Pair, plain: Mapping[str, Any], greedy: results.Result | None) -> str:
    run, (target, draft) = pair.last, pair.names
    measured = f"""`python -m benchmarks.real.real_models {target} {draft}` on {run.device["kind"]}, jax
    {run.versions["jax"]}, {run.settings["dtype"]}, {run.settings["new"]} tokens an answer, on {run.day} (commit
    {run.code})."""
    if greedy is not None:
        alone, drafted, of = greedy.measured["plain"], greedy.measured["with drafts"], greedy.settings["prompts"]
        measured += f""" In float32, {alone} of {of} greedy answers of {greedy.settings["new"]} tokens are, token for token,
        those of transformers on the same card, and {drafted} with drafts (`python -m benchmarks.real.greedy {target}
        {draft}`)."""
    drafting = {way: figures["accepted"] for way, figures in pair.ways.items() if "accepted" in figures}
    rates = {way: figures["rates"] for way, figures in pair.ways.items()}
    parts = [f"## {target} with {draft}", paragraph(measured), "### Tokens a round", _accepted(drafting)]
    parts += ["### Which drafts are accepted", _positions(drafting), "### Tokens a second", _rates(rates, plain)]
    return "\n\n".join(parts)


def _accepted(ways: Mapping[str, Any]) -> str:
    columns = [f"{kind}, T = {temperature:g}" for kind in (*KINDS, "all") for temperature in TEMPERATURES]
    rows = []
    for way in sorted(ways):
        cells = (ways[way][f"{temperature}, {kind}"] for kind in (*KINDS, "all") for temperature in TEMPERATURES)
        rows.append([way, *(f"{cell['tokens']:.2f} ± {cell['error']:.2f}" for cell in cells)])
    return table(["", *columns], rows)


def _positions(ways: Mapping[str, Any]) -> str:
    rows = []
    for way in sorted(ways):
        shares = (ways[way][f"{temperature}, all"]["positions"] for temperature in TEMPERATURES)
        rows.append([way, *(" ".join(f"{share:.2f}" for share in each) for each in shares)])
    return table(["share of rounds", *(f"T = {temperature:g}" for temperature in TEMPERATURES)], rows)


def _rates(ways: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    keys = [f"{temperature}, {rows}" for temperature in TIMED_TEMPERATURES for rows in ROWS]
    names = [f"{rows} at a time, T = {temperature:g}" for temperature in TIMED_TEMPERATURES for rows in ROWS]
    rows = []
    for way, figures in sorted(ways.items(), key=lambda item: (item[0] != "plain", item[0])):
        cells = [way]
        for key in keys:
            one = figures.get(key)
            over = f" ({one['tokens'] / plain[key]['tokens']:.2f})" if one and key in plain and way != "plain" else ""
            cells.append(f"{one['tokens']:.0f} ± {one['error']:.0f}{over}" if one else "-")
        rows.append(cells)
    return table(["", *names], rows)
