"""Every drafter of the shipped family: how many of its drafts are accepted by temperature and rule, and how fast rounds
are.

    python -m benchmarks.acceptance.drafters                       # all of them; half an hour on two cores
    python -m benchmarks.acceptance.drafters --only eagle3 mlp     # these alone
    python -m benchmarks.acceptance.drafters --rates               # how fast rounds are, and nothing else

It writes a result into benchmarks/results/, from which ``python -m benchmarks.tables`` makes docs/results/drafters.md
and its plot; what a run leaves out is taken from earlier results. Prompts are pieces of standard-library files that the
family was not trained on, completions a fixed number of tokens.
"""

import argparse
import dataclasses
import itertools
import operator
import sysconfig
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import jax

import jspec
from benchmarks.acceptance.expected import Recorder, Texts
from benchmarks.report import results
from benchmarks.report.markdown import paragraph, table
from convert.folders import load_draft, load_folder
from jspec.commands.demo import FAMILY, drafters
from jspec.config import EngineConfig, ModelConfig, Speculation
from jspec.drafting.methods import drafter_for
from jspec.llm import LLM
from jspec.loading.modules import build_draft_module
from jspec.models import build
from jspec.outputs import total_stats
from jspec.registry import NGRAM, argmax_below
from recipes.corpus import is_held_out, read_sources

TEMPERATURES = (0.0, 0.3, 0.5, 0.7, 1.0, 1.3, 1.5, 2.0)
K = 4
PROMPT_TOKENS = 48
WAYS = {
    "argmax, rejection": ("argmax", "rejection"),
    "sample, rejection": ("sample", "rejection"),
    "sample, block": ("sample", "block"),
    "coupled, match": ("coupled", "match"),
}


@dataclasses.dataclass
class Measured:
    """The figures of one drafter; lists have an entry for each temperature.

    Attributes:
      method: how it drafts.
      num_draft_tokens: K.
      lengths: way of drafting and rule -> acceptance length, the bonus or recovered token included.
      positions: way of drafting and rule -> share of rounds that accept draft 1 to K.
      expected: rule -> acceptance length by exact expectation over the uniforms, on the same rounds of sampled drafts.
      rounds_per_second: rounds per second, summed over the 8 rows of a batch at temperature 1, on this machine.
    """

    method: str
    num_draft_tokens: int
    lengths: dict[str, list[float]]
    positions: dict[str, list[list[float]]]
    expected: dict[str, list[float]]
    rounds_per_second: float


def prompts(count: int) -> list[list[int]]:
    """Token ids from a quarter of the way into held-out files, the first ``count`` by path."""
    tokenizer = jspec.load(FAMILY / "target", max_batch=1, max_len=64).tokenizer
    assert tokenizer is not None
    texts = [s.text for s in read_sources(Path(sysconfig.get_paths()["stdlib"])) if is_held_out(s.path)]
    encoded = (tokenizer.encode(text[len(text) // 4 :][:2000]) for text in texts)
    return [ids[:PROMPT_TOKENS] for ids in encoded if len(ids) >= PROMPT_TOKENS][:count]


def load(name: str, verify: str, draft_sampling: str) -> LLM:
    """The family's target with one of its drafters."""
    how = Speculation(K, verify, draft_sampling)  # pyright: ignore[reportArgumentType]
    draft = name if name == NGRAM else FAMILY / name
    with warnings.catch_warnings():  # fewer drafts than asked for are shown in the table
        warnings.filterwarnings("ignore", "num_draft_tokens=", UserWarning)
        return jspec.load(FAMILY / "target", draft, speculation=how, max_batch=8, max_len=128, page_size=32).warmup()


def accepted(llm: LLM, batch: list[list[int]], max_tokens: int) -> list[jspec.Stats]:
    """The counts of all prompts together, an entry for each temperature."""
    requests = [(t, prompt) for t in TEMPERATURES for prompt in batch]
    params = [jspec.SamplingParams(temperature=t, max_tokens=max_tokens, ignore_eos=True) for t, _ in requests]
    texts = jspec.generate(llm, [prompt for _, prompt in requests], params, key=jax.random.key(0))
    assert isinstance(texts, list)
    stats = [text.stats for text in texts]
    n = len(batch)
    return [total_stats(stats[i * n : (i + 1) * n]) for i in range(len(TEMPERATURES))]


def rounds_per_second(llm: LLM, batch: list[list[int]]) -> float:
    """Rounds per second, summed over eight rows at temperature 1, the better of two runs."""
    params = jspec.SamplingParams(max_tokens=64, ignore_eos=True)
    rates = []
    for _ in range(2):
        started = time.perf_counter()
        texts = jspec.generate(llm, batch[:8], params, key=jax.random.key(1))
        assert isinstance(texts, list)
        rates.append(sum(text.stats.num_steps for text in texts) / (time.perf_counter() - started))
    return max(rates)


def measure(name: str, batch: list[list[int]], max_tokens: int) -> Measured:
    """All ways and temperatures of one drafter. N-gram drafts are not drawn, so they have one way."""
    ways = {"argmax, rejection": WAYS["argmax, rejection"]} if name == NGRAM else WAYS
    found = Measured("", K, {}, {}, {}, 0.0)
    for way, (draft_sampling, verify) in ways.items():
        llm = load(name, verify, draft_sampling)
        stats = accepted(llm, batch, max_tokens)
        found.lengths[way] = [s.mean_acceptance_length for s in stats]
        found.positions[way] = [[n / s.num_steps for n in s.accepted_per_position] for s in stats]
        if way == "sample, rejection" or name == NGRAM:
            found.method, found.num_draft_tokens = llm.method or "", llm.speculation.num_draft_tokens
            found.rounds_per_second = rounds_per_second(llm, batch)
        if way == "sample, rejection":
            found.expected = expected(FAMILY / name, batch, max_tokens)
    return found


def expected(
    folder: Path, batch: list[list[int]], max_tokens: int, temperatures: Sequence[float] = TEMPERATURES
) -> dict[str, list[float]]:
    """Rule -> acceptance length by exact expectation, per temperature, of the family's target with a folder's drafter."""
    config, params = load_folder(FAMILY / "target", "float32")
    target = build(config, params)
    draft, module = build_draft_module(*load_draft(folder, "float32"), "float32", target)
    drafts = K if isinstance(draft, ModelConfig) else min(K, draft.max_drafts or K)
    make = drafter_for(draft, config, Speculation(drafts, draft_sampling="sample"))
    recorder = Recorder(target, module, make, EngineConfig(max_batch=len(batch), max_len=128, page_size=32))
    pairs = [recorder.acceptance_lengths(Texts(batch, max_tokens, t)) for t in temperatures]
    return {"rejection": [pair[0] for pair in pairs], "block": [pair[1] for pair in pairs]}


ARGMAX_OR_SAMPLED = """An argmax draft is accepted with probability p(draft), which falls as the target's distribution
flattens. A sampled draft is accepted with probability sum of min(p, q), the overlap of both distributions, which stays high
because the draft's distribution flattens too. Where the draft's distribution is far from the target's, the overlap is small
and the likeliest token stays the better draft up to a higher temperature. This is so for `parallel`, `dflash` and `medusa`,
whose drafts do not depend on each other. `draft_sampling="auto"` therefore has a temperature for each method from which on
it samples, chosen by these figures:"""

BY_EXPECTATION = """Both rules verify the same rounds of sampled drafts; the uniforms of the accept tests are averaged over.
With r_i the
ratio p / q of draft i, the expected number of accepted drafts is the sum over i of min(r_1, 1) ... min(r_i, 1) under
`rejection`, and the sum over i of w_i with w_i = min(w_{i-1} r_i, 1) under `block`, which is never smaller (Sun et al.,
2024)."""

WHAT_IS_READ = """A draft counts only where those before it were accepted. The share of drafts that are accepted there says
what a drafter knows at each place. Those that read the drafts before them (`draft`, `eagle`, `eagle3`, `mlp`) do as well at
the fourth draft as at the first, or better: where drafts were accepted, the text is easy. Drafts that are made at once do
not read those before them, and are accepted less from one to the next. A Markov head (`dspark`) reads one of them."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The drafters of several runs side by side.

    Attributes:
      drafters: by name, in the order of the tables, with an asterisk behind the name of one that is not shipped.
      plain: rounds per second of plain decoding, as ``Measured.rounds_per_second`` counts them.
      last: the run that was the last.
    """

    drafters: dict[str, Measured]
    plain: float
    last: results.Result


def comparison_of(runs: Sequence[results.Result]) -> Comparison:
    """What was measured last of every drafter. The results are in order, the earliest first."""
    fields, plain = {}, 0.0
    for run in runs:
        plain = run.measured["plain_rounds_per_second"]
        for name, measured in run.measured["drafters"].items():
            fields[name] = fields.get(name, {}) | measured
    shipped = [name for name in (*drafters(FAMILY), NGRAM) if name in fields]
    others = {f"{name}*": fields[name] for name in sorted(fields) if name not in shipped}
    every = {name: fields[name] for name in shipped} | others
    return Comparison({name: Measured(**measured) for name, measured in every.items()}, plain, runs[-1])


def markdown(comparison: Comparison) -> str:
    """docs/results/drafters.md."""
    last, how = comparison.last, comparison.last.settings
    versions = f"Python {last.versions['python']}, jax {last.versions['jax']}, {last.device['kind']}, {how['dtype']}"
    written = f"""Measured by `python -m benchmarks.acceptance.drafters` ({versions}); written by `python -m
    benchmarks.tables` from [`benchmarks/results/`](../../benchmarks/results)."""
    introduction = f"""The shipped family, K = {K}, and two draft heads for it that are not shipped, marked *: a DFlash head
    of two layers, trained with `--loss soft` as the DSpark head was, and three Medusa heads, which give K = 3. An acceptance
    length is the number of tokens that a round gives, the bonus or recovered token included, so plain decoding is at 1.00.
    {how["prompts"]} prompts of {how["prompt_tokens"]} tokens are from standard-library files held out of training; each gets
    {how["max_tokens"]} new tokens, without top-k, top-p or min-p. Rounds per second are summed over the 8 rows of a batch on
    this CPU at temperature 1; plain decoding makes {comparison.plain:.0f}."""
    overview = ("at temperature 0", "sampled, at 1", "by position, sampled, at 1", "rounds/s", "tokens/s against plain")
    temperatures = [f"{t:g}" for t in TEMPERATURES]
    each = comparison.drafters.items()
    lengths = [(name, way, *(f"{x:.2f}" for x in row)) for name, m in each for way, row in m.lengths.items()]
    expected = [(name, rule, *(f"{x:.3f}" for x in row)) for name, m in each for rule, row in m.expected.items()]
    changes = ("drafter", "method", "sampled drafts are ahead from", "`auto` samples from")
    parts = [
        "# Every drafter, by temperature and rule",
        paragraph(written),
        paragraph(introduction),
        "![acceptance length by temperature](drafters.png)",
        table(("drafter", "method", *overview), [_overview(name, m, comparison.plain) for name, m in each]),
        "## Draft by draft",
        paragraph(WHAT_IS_READ),
        table(("drafter", "method", "at temperature 0", "at 1"), [_draft_by_draft(name, m) for name, m in each]),
        *([paragraph(_why_blocks_trail(comparison))] if {"eagle3", "dspark"} <= comparison.drafters.keys() else []),
        "## By temperature",
        table(("drafter", "drafts, rule", *temperatures), lengths),
        "## Argmax or sampled drafts",
        paragraph(ARGMAX_OR_SAMPLED),
        table(changes, [(name, m.method, *_changeover(m)) for name, m in each if m.expected]),
        "## `block` against `rejection`, by exact expectation",
        paragraph(BY_EXPECTATION),
        table(("drafter", "rule", *temperatures), expected),
    ]
    return "\n\n".join(parts) + "\n"


def _overview(name: str, m: Measured, plain: float) -> tuple[str, ...]:
    at_one, way = TEMPERATURES.index(1.0), "sample, rejection" if m.expected else "argmax, rejection"
    length, rate = m.lengths[way][at_one], m.rounds_per_second
    positions = " ".join(f"{share:.2f}" for share in m.positions[way][at_one])
    greedy, gain = m.lengths["argmax, rejection"][0], length * rate / plain
    rates = ("-", "-") if name.endswith("*") else (f"{rate:.0f}", f"{gain:.2f}")  # not measured with the others
    return name, m.method, f"{greedy:.2f}", f"{length:.2f}", positions, *rates


def _shares(m: Measured, temperature: float) -> list[float]:
    """The share of drafts 1, 2, .. that are accepted where all before them were, of sampled drafts under ``rejection``."""
    way = "sample, rejection" if m.expected else "argmax, rejection"
    accepted = [1.0, *m.positions[way][TEMPERATURES.index(temperature)]]
    return [after / before if before else 0.0 for before, after in itertools.pairwise(accepted)]


def _draft_by_draft(name: str, m: Measured) -> tuple[str, ...]:
    return name, m.method, *(" ".join(f"{share:.2f}" for share in _shares(m, t)) for t in (0.0, 1.0))


def _length_of(shares: Sequence[float]) -> float:
    """The acceptance length of drafts with these shares."""
    return 1 + sum(itertools.accumulate(shares, operator.mul))


def _why_blocks_trail(comparison: Comparison) -> str:
    """What of the distance between EAGLE-3 and the DSpark head is due to the first draft."""
    said = []
    for temperature in (0.0, 1.0):
        ahead, behind = (_shares(comparison.drafters[name], temperature) for name in ("eagle3", "dspark"))
        low, middle, high = (_length_of(shares) for shares in (behind, [ahead[0], *behind[1:]], ahead))
        said.append(
            f"{middle - low:.2f} of the {high - low:.2f} tokens a round that it is behind at temperature {temperature:g}"
        )
    return f"""So most of what `dspark` lacks against `eagle3` comes from the later drafts, which `eagle3` makes with a pass
    each and `dspark` with one pass for all. With the first drafts of `eagle3` and its own later ones, it would regain
    {", and ".join(said)}. `parallel` makes its drafts in one pass, too. Its first draft is nearly as good as that of
    `eagle3`, and those behind it lose in the same way."""


def _changeover(m: Measured) -> tuple[str, str]:
    """From which temperature on sampled drafts are accepted more than argmax drafts, and where ``auto`` changes
    over."""
    pairs = zip(m.lengths["argmax, rejection"], m.lengths["sample, rejection"], strict=True)
    last = max(i for i, (argmax, sample) in enumerate(pairs) if sample <= argmax or i == 0)  # at 0 both are the same
    ahead = f"{TEMPERATURES[last + 1]:g}" if last + 1 < len(TEMPERATURES) else "nowhere here"
    return ahead, f"{argmax_below(m.method):g}"


def plot(comparison: Comparison, file: Path):
    """A panel for each drafter, a line for each way of drafting and rule."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = 3
    lines = -(-len(comparison.drafters) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(11, 3 * lines), sharex=True, sharey=True, squeeze=False)
    for panel, (name, m) in zip(axes.flat, comparison.drafters.items(), strict=False):
        for way, lengths in m.lengths.items():
            panel.plot(TEMPERATURES, lengths, marker=".", label=way)
        panel.set_title(name, fontsize=10)
        panel.grid(alpha=0.3)
    for panel in axes.flat[len(comparison.drafters) :]:
        panel.axis("off")
    axes.flat[0].legend(fontsize=7)
    figure.supxlabel("temperature")
    figure.supylabel("tokens per round")
    figure.tight_layout()
    figure.savefig(file, dpi=100)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--only", nargs="+", metavar="DRAFTER")
    parser.add_argument("--rates", action="store_true", help="measure rounds per second alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the result, by default in benchmarks/results/")
    args = parser.parse_args()
    settings = {"num_draft_tokens": K, "prompts": args.prompts, "prompt_tokens": PROMPT_TOKENS}
    settings |= {"max_tokens": args.max_tokens, "temperatures": TEMPERATURES, "dtype": "float32"}
    result = results.begin("drafters", settings)
    file = args.json or results.RESULTS / f"drafters-{result.day}.json"
    batch = prompts(args.prompts)
    alone = jspec.load(FAMILY / "target", max_batch=8, max_len=128, page_size=32).warmup()
    result.measured.update(plain_rounds_per_second=rounds_per_second(alone, batch), drafters={})
    for name in args.only or [*drafters(FAMILY), NGRAM]:
        started = time.perf_counter()
        if args.rates:
            how = ("argmax" if name == NGRAM else "sample", "rejection")
            measured = {"rounds_per_second": rounds_per_second(load(name, how[1], how[0]), batch)}
        else:
            measured = dataclasses.asdict(measure(name, batch, args.max_tokens))
        result.measured["drafters"][name] = measured
        print(f"{name}: {time.perf_counter() - started:.0f} s", measured, flush=True)
        results.write(result, file)
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
