"""``jspec demo``: text generated with and without drafts, with accepted drafts in colour, and both speeds."""

import argparse
import dataclasses
import functools
import importlib.resources
import pathlib
import time
import warnings

from rich.console import Console
from rich.table import Table
from rich.text import Text

import jspec
from jspec.commands.generate import speculation_of
from jspec.llm import LLM
from jspec.outputs import total_stats
from jspec.registry import NGRAM
from jspec.text.detokenizer import Detokenizer

PROMPTS = (
    "import os\nimport sys\n\n\ndef main(argv=None):",
    "class Queue:\n    def __init__(self, maxsize=0):",
    'def read_config(path):\n    """Return the configuration',
    "class TestPath(unittest.TestCase):\n    def setUp(self):",
)
# Checkpoints that the scripts in the repository's recipes/ trained. They are data of the package, so that an installed
# jspec has them.
FAMILY = pathlib.Path(str(importlib.resources.files("jspec"))) / "demo_models"


@dataclasses.dataclass(frozen=True)
class TimedRun:
    """The results of several prompts, and the seconds that they took together."""

    results: list[jspec.Result]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(result.token_ids) for result in self.results)

    @property
    def rate(self) -> float:
        """Tokens per second, over all prompts."""
        return self.tokens / self.seconds

    @property
    def stats(self) -> jspec.Stats:
        return total_stats(result.stats for result in self.results)


def run(args: argparse.Namespace) -> int:
    """Complete the demo prompts with and without speculation, and print texts and speeds; returns the exit code.

    ``--checkpoints`` holds target/ and, beside it, one folder for each drafter; by default it is the small models that come
    with jspec. ``--draft`` is the name of a drafter in there, draft/ by default, another folder, or ``ngram``.
    """
    if args.all and args.draft:
        raise ValueError(f"--all compares every drafter: leave out --draft {args.draft}")
    params = jspec.SamplingParams(
        temperature=args.temperature, top_p=args.top_p, seed=args.seed, max_tokens=args.max_tokens
    )
    (compare if args.all else complete)(args, speculation_of(args), params)
    return 0


def complete(args: argparse.Namespace, speculation: jspec.Speculation, params: jspec.SamplingParams):
    """Complete the demo prompts with and without speculation, and print texts and speeds."""
    console = Console(highlight=False)
    folder, draft = args.checkpoints or FAMILY, args.draft or "draft"
    console.print(f"[dim]loading and compiling {folder.name}/target, drafted for by {draft} …")
    plain, llm = _load(folder), _load(folder, draft, speculation)
    without, with_drafts = _timed(plain, params), _timed(llm, params)
    for prompt, result in zip(PROMPTS, with_drafts.results, strict=True):
        console.rule(f"[dim]{result.finish_reason}, acceptance length {result.stats.mean_acceptance_length:.2f}")
        console.print(_coloured(llm, prompt, result))
    console.rule()
    console.print("[dim]prompt[/], [bold]drawn by the target[/], [green]drafted and accepted")
    console.print(_table(without, with_drafts, llm.speculation))


def compare(args: argparse.Namespace, speculation: jspec.Speculation, params: jspec.SamplingParams):
    """Complete the demo prompts with every drafter beside the target, and print one line for each."""
    console = Console(highlight=False)
    folder = args.checkpoints or FAMILY
    plain = _timed(_load(folder), params)
    table = Table(box=None)
    for heading in ("drafter", "method", "K", "acceptance length", "by position", "tokens/s", "ratio"):
        table.add_column(heading, justify="left" if heading in ("drafter", "method", "by position") else "right")
    table.add_row("none", "", "", "1.00", "", f"{plain.rate:.1f}", "1.00")
    for name in [*drafters(folder), NGRAM]:
        console.print(f"[dim]loading and compiling {name} …")
        with warnings.catch_warnings():  # the table shows where there are fewer drafts than asked for
            warnings.filterwarnings("ignore", "num_draft_tokens=", UserWarning)
            llm = _load(folder, name, speculation)
        drafted = _timed(llm, params)
        rates = "  ".join(f"{rate:.2f}" for rate in drafted.stats.acceptance_rate_per_position)
        length, K = drafted.stats.mean_acceptance_length, _drafts(llm.speculation, drafted.stats)
        ratio = drafted.rate / plain.rate
        table.add_row(name, llm.method, K, f"{length:.2f}", rates, f"{drafted.rate:.1f}", f"{ratio:.2f}")
    console.print(table)
    console.print(f"[dim]{speculation.verify}, {speculation.draft_sampling}, temperature {params.temperature:g}")


def drafters(folder: pathlib.Path) -> list[str]:
    """Names of the checkpoints beside target/."""
    return sorted(path.parent.name for path in folder.glob("*/config.json") if path.parent.name != "target")


def _load(folder: pathlib.Path, draft: str | None = None, speculation: jspec.Speculation | None = None) -> LLM:
    beside = None if draft is None else folder / draft
    return jspec.load(
        folder / "target",
        beside if beside is not None and beside.is_dir() else draft,
        speculation=speculation,
        max_batch=len(PROMPTS),
        max_len=256,
        page_size=32,
        prefill_chunk=32,
    ).warmup()


def _timed(llm: LLM, params: jspec.SamplingParams) -> TimedRun:
    start = time.perf_counter()
    results = jspec.generate(llm, list(PROMPTS), params)
    assert isinstance(results, list)
    return TimedRun(results, time.perf_counter() - start)


def _coloured(llm: LLM, prompt: str, result: jspec.Result) -> Text:
    """The text with its prompt dim, tokens that the target drew bold, and accepted drafts green."""
    text, style = Text(prompt, style="dim"), ""
    assert llm.tokenizer is not None
    completion = Detokenizer(functools.partial(llm.tokenizer.decode, skip_special_tokens=True), result.prompt_token_ids)
    for token, accepted in zip(result.token_ids, result.accepted, strict=True):
        style = "green" if accepted else "bold"
        text.append(completion.add([token]), style)
    return text.append(completion.held, style)


def _table(plain: TimedRun, drafted: TimedRun, speculation: jspec.Speculation) -> Table:
    stats = drafted.stats
    table = Table(box=None, show_header=False)
    table.add_row("acceptance length", f"{stats.mean_acceptance_length:.2f} tokens per pass of the target")
    rates = "  ".join(f"{rate:.2f}" for rate in stats.acceptance_rate_per_position)
    table.add_row("acceptance by position", rates)
    table.add_row("passes of the target", f"{plain.stats.num_steps} plain, {stats.num_steps} with drafts")
    table.add_row("tokens per second", f"{plain.rate:.1f} plain, {drafted.rate:.1f} with drafts")
    table.add_row("measured ratio", f"{drafted.rate / plain.rate:.2f}")
    table.add_row(
        "[dim]settings", f"[dim]K={_drafts(speculation, stats)}, {speculation.verify}, {speculation.draft_sampling}"
    )
    return table


def _drafts(speculation: jspec.Speculation, stats: jspec.Stats) -> str:
    """K; if the engine chose it, ``auto`` and the mean."""
    K = speculation.num_draft_tokens
    return f"{K} ({stats.mean_draft_tokens:.2f})" if K == "auto" else str(K)
