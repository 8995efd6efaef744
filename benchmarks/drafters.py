"""Every drafter of the shipped family: how much of it is accepted by temperature and rule, and how fast rounds are.

    python -m benchmarks.drafters          # writes docs/drafters.md, .png and .json; half an hour on two cores
    python -m benchmarks.drafters --only eagle3 mlp     # these alone, the rest from docs/drafters.json
    python -m benchmarks.drafters --rates               # how fast rounds are, again, and nothing else

Prompts are pieces of standard-library files that the family was not trained on, completions a fixed number of tokens.
"""

import argparse
import dataclasses
import functools
import json
import operator
import platform
import sysconfig
import time
import warnings
from pathlib import Path

import jax
import matplotlib

import jspec
from benchmarks.expected import Recorder, Texts
from family.corpus import is_held_out, read_sources
from jspec.checkpoints.loading import load_folder
from jspec.config import EngineConfig, ModelConfig, Speculation
from jspec.demo import FAMILY, drafters
from jspec.drafting.methods import drafter_for
from jspec.llm import LLM
from jspec.loading import load_draft_module
from jspec.models import build
from jspec.registry import NGRAM, argmax_below

matplotlib.use("Agg")
from matplotlib import pyplot

DOCS = Path(__file__).parents[1] / "docs"
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
    """Of one drafter; lists have an entry per temperature.

    Attributes:
      method: how it drafts.
      num_draft_tokens: K.
      lengths: way -> acceptance length, the bonus or correction token included.
      positions: way -> share of rounds that accept draft 1 to K.
      expected: rule -> acceptance length by exact expectation over the coins, on the same rounds of sampled drafts.
      rounds_per_second: row rounds per second of a batch of 8 at temperature 1, on this machine.
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
    """Rounds of all prompts together, one entry per temperature."""
    rows = [(t, prompt) for t in TEMPERATURES for prompt in batch]
    params = [jspec.SamplingParams(temperature=t, max_tokens=max_tokens, ignore_eos=True) for t, _ in rows]
    results = jspec.generate(llm, [prompt for _, prompt in rows], params, key=jax.random.key(0))
    assert isinstance(results, list)
    stats = [result.stats for result in results]
    n = len(batch)
    return [functools.reduce(operator.add, stats[i * n : (i + 1) * n]) for i in range(len(TEMPERATURES))]


def rounds_per_second(llm: LLM, batch: list[list[int]]) -> float:
    """Row rounds per second of eight prompts at temperature 1, the better of two runs."""
    params = jspec.SamplingParams(max_tokens=64, ignore_eos=True)
    rates = []
    for _ in range(2):
        started = time.perf_counter()
        results = jspec.generate(llm, batch[:8], params, key=jax.random.key(1))
        assert isinstance(results, list)
        rates.append(sum(r.stats.num_steps for r in results) / (time.perf_counter() - started))
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
            found.expected = expected(name, batch, max_tokens)
    return found


def expected(name: str, batch: list[list[int]], max_tokens: int) -> dict[str, list[float]]:
    """Rule -> acceptance length by exact expectation, per temperature."""
    config, params = load_folder(FAMILY / "target", "float32")
    target = build(config, params)
    draft, module = load_draft_module(FAMILY / name, "float32", None, target)
    drafts = K if isinstance(draft, ModelConfig) else min(K, draft.max_drafts or K)
    make = drafter_for(draft, config, Speculation(drafts, draft_sampling="sample"))
    recorder = Recorder(target, module, make, EngineConfig(max_batch=len(batch), max_len=128, page_size=32))
    pairs = [recorder.acceptance_lengths(Texts(batch, max_tokens, t)) for t in TEMPERATURES]
    return {"rejection": [pair[0] for pair in pairs], "block": [pair[1] for pair in pairs]}


ARGMAX_OR_SAMPLED = """
## Argmax or sampled drafts

An argmax draft passes with probability p(draft), which falls as the target's distribution flattens. A sampled draft
passes with the overlap of both distributions, the sum of min(p, q), which stays high because the draft's distribution
flattens too. Where the draft's distribution is far from the target's, the overlap is small and the likeliest token is the
better bet for longer: so the marginal drafters, `parallel` and `medusa`, whose drafts do not see each other, change
over later. `draft_sampling="auto"` samples from a temperature of its own for each method, and these figures are what it
rests on:

| drafter | method | sampled drafts are ahead from | `auto` samples from |
|---|---|---|---|"""

BY_EXPECTATION = """
## `block` against `rejection`, by exact expectation

The same rounds of sampled drafts, judged by both rules; the coins are not thrown but averaged over. With r the ratio
p / q of a draft, `rejection` accepts the sum over i of the product of min(r, 1), and `block` the sum of its w, which is
never the smaller (Sun et al., 2024).
"""


def report(found: dict[str, Measured], plain: float, count: int, max_tokens: int) -> str:
    """docs/drafters.md."""
    versions = f"Python {platform.python_version()}, jax {jax.__version__}, {jax.default_backend()}, float32"
    temperatures = " | ".join(f"{t:g}" for t in TEMPERATURES)
    head = f"""# Every drafter, by temperature and rule

Written by `python -m benchmarks.drafters` ({versions}).

The shipped family, K = {K} (three Medusa heads give K = 3): tokens per pass of the target, the bonus or correction token
included, so plain decoding is 1.00. {count} prompts of {PROMPT_TOKENS} tokens from standard-library files held out of
training, {max_tokens} new tokens each, no top-k, top-p or min-p. Row rounds per second are rounds times rows of a batch
of 8 on this CPU at temperature 1; plain decoding makes {plain:.0f}.

![acceptance length by temperature](drafters.png)

| drafter | method | at temperature 0 | sampled, at 1 | by position, sampled, at 1 | row rounds/s | tokens/s against plain |
|---|---|---|---|---|---|---|"""
    by_temperature = [f"\n## By temperature\n\n| drafter | way | {temperatures} |", _rule(2 + len(TEMPERATURES))]
    for name, m in found.items():
        by_temperature += [_row(name, way, *(f"{x:.2f}" for x in lengths)) for way, lengths in m.lengths.items()]
    changes = [_row(name, m.method, *_changeover(m)) for name, m in found.items() if m.expected]
    expectations = [f"| drafter | rule | {temperatures} |", _rule(2 + len(TEMPERATURES))]
    for name, m in found.items():
        expectations += [_row(name, rule, *(f"{x:.3f}" for x in lengths)) for rule, lengths in m.expected.items()]
    overview = [_overview(name, m, plain) for name, m in found.items()]
    lines = [head, *overview, *by_temperature, ARGMAX_OR_SAMPLED, *changes, BY_EXPECTATION, *expectations]
    return "\n".join(lines) + "\n"


def _row(*cells) -> str:
    return "| " + " | ".join(cells) + " |"


def _rule(cells: int) -> str:
    return "|" + "---|" * cells


def _overview(name: str, m: Measured, plain: float) -> str:
    at_one, way = TEMPERATURES.index(1.0), "sample, rejection" if m.expected else "argmax, rejection"
    length, rate = m.lengths[way][at_one], m.rounds_per_second
    positions = " ".join(f"{share:.2f}" for share in m.positions[way][at_one])
    greedy, gain = m.lengths["argmax, rejection"][0], length * rate / plain
    return _row(name, m.method, f"{greedy:.2f}", f"{length:.2f}", positions, f"{rate:.0f}", f"{gain:.2f}")


def _changeover(m: Measured) -> tuple[str, str]:
    """From which temperature on sampled drafts are accepted more than argmax drafts, and where ``auto`` changes
    over."""
    pairs = zip(m.lengths["argmax, rejection"], m.lengths["sample, rejection"], strict=True)
    last = max(i for i, (argmax, sample) in enumerate(pairs) if sample <= argmax or i == 0)  # at 0 both are the same
    ahead = f"{TEMPERATURES[last + 1]:g}" if last + 1 < len(TEMPERATURES) else "nowhere here"
    return ahead, f"{argmax_below(m.method):g}"


def plot(found: dict[str, Measured], file: Path):
    """A panel per drafter, a line per way."""
    columns = 3
    lines = -(-len(found) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(11, 3 * lines), sharex=True, sharey=True, squeeze=False)
    for panel, (name, m) in zip(axes.flat, found.items(), strict=False):
        for way, lengths in m.lengths.items():
            panel.plot(TEMPERATURES, lengths, marker=".", label=way)
        panel.set_title(name, fontsize=10)
        panel.grid(alpha=0.3)
    for panel in axes.flat[len(found) :]:
        panel.axis("off")
    axes.flat[0].legend(fontsize=7)
    figure.supxlabel("temperature")
    figure.supylabel("tokens per pass of the target")
    figure.tight_layout()
    figure.savefig(file, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--only", nargs="+", metavar="DRAFTER")
    parser.add_argument("--rates", action="store_true")
    args = parser.parse_args()
    batch = prompts(args.prompts)
    stored = DOCS / "drafters.json"
    known = {name: Measured(**m) for name, m in json.loads(stored.read_text()).items()} if stored.exists() else {}
    everything = [*drafters(FAMILY), NGRAM]
    for name in args.only or everything:
        started = time.perf_counter()
        if args.rates:
            known[name].rounds_per_second = rounds_per_second(load(name, "rejection", "sample"), batch)
        else:
            known[name] = measure(name, batch, args.max_tokens)
        print(f"{name}: {time.perf_counter() - started:.0f} s", known[name].lengths, flush=True)
        stored.write_text(json.dumps({n: dataclasses.asdict(m) for n, m in known.items()}, indent=1) + "\n")
    found = {name: known[name] for name in everything if name in known}
    alone = jspec.load(FAMILY / "target", max_batch=8, max_len=128, page_size=32).warmup()
    (DOCS / "drafters.md").write_text(report(found, rounds_per_second(alone, batch), len(batch), args.max_tokens))
    plot(found, DOCS / "drafters.png")


if __name__ == "__main__":
    main()
