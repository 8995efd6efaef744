"""Acceptance length by temperature, for every way of drafting with the shipped family.

    python -m benchmarks.acceptance          # writes docs/acceptance.md and docs/acceptance.png; minutes on two cores

Prompts are pieces of standard-library files that the family was not trained on, completions a fixed number of tokens.
"""

import argparse
import dataclasses
import functools
import operator
import platform
import sysconfig
import time
from pathlib import Path

import jax
import matplotlib

import jspec
from family.corpus import is_held_out, read_sources
from jspec.demo import FAMILY

matplotlib.use("Agg")
from matplotlib import pyplot

DOCS = Path(__file__).parents[1] / "docs"
TEMPERATURES = (0.0, 0.3, 0.5, 0.7, 1.0, 1.3, 1.5, 2.0)
K = 4
PROMPT_TOKENS = 48


@dataclasses.dataclass(frozen=True)
class Column:
    """One way of drafting."""

    name: str
    draft: str
    speculation: jspec.Speculation


def columns() -> list[Column]:
    """What the table compares."""
    draft = str(FAMILY / "draft")

    def how(verify, draft_sampling):
        return jspec.Speculation(num_draft_tokens=K, verify=verify, draft_sampling=draft_sampling)

    return [
        Column("argmax", draft, how("rejection", "argmax")),
        Column("sample", draft, how("rejection", "sample")),
        Column("sample, block", draft, how("block", "sample")),
        Column("coupled, match", draft, how("match", "coupled")),
        Column("ngram", "ngram", how("rejection", "argmax")),
    ]


def prompts(count: int) -> list[list[int]]:
    """Token ids from a quarter of the way into held-out files, the first ``count`` by path."""
    tokenizer = jspec.load(FAMILY / "target", max_batch=1, max_len=64).tokenizer
    assert tokenizer is not None
    texts = [s.text for s in read_sources(Path(sysconfig.get_paths()["stdlib"])) if is_held_out(s.path)]
    encoded = (tokenizer.encode(text[len(text) // 4 :][:2000]) for text in texts)
    return [ids[:PROMPT_TOKENS] for ids in encoded if len(ids) >= PROMPT_TOKENS][:count]


def measure(column: Column, batch: list[list[int]], max_tokens: int) -> list[jspec.Stats]:
    """Steps of all prompts together, one entry per temperature."""
    llm = jspec.load(
        FAMILY / "target", column.draft, speculation=column.speculation, max_batch=8, max_len=128, page_size=32
    )
    rows = [(t, prompt) for t in TEMPERATURES for prompt in batch]
    params = [jspec.SamplingParams(temperature=t, max_tokens=max_tokens, ignore_eos=True) for t, _ in rows]
    results = jspec.generate(llm, [prompt for _, prompt in rows], params, key=jax.random.key(0))
    assert isinstance(results, list)
    stats = [result.stats for result in results]
    n = len(batch)
    return [functools.reduce(operator.add, stats[i * n : (i + 1) * n]) for i in range(len(TEMPERATURES))]


def overtaken_from(argmax: list[jspec.Stats], sample: list[jspec.Stats]) -> float | None:
    """Lowest measured temperature above 0 from which sampled drafts are always accepted more; None if there is none."""
    behind = [s.mean_acceptance_length <= a.mean_acceptance_length for a, s in zip(argmax, sample, strict=True)]
    last = max(i for i, is_behind in enumerate(behind) if is_behind)  # at 0 both are the same
    return TEMPERATURES[last + 1] if last + 1 < len(TEMPERATURES) else None


def report(table: dict[str, list[jspec.Stats]], prompt_count: int, max_tokens: int) -> str:
    """docs/acceptance.md."""
    head = " | ".join(table)
    lines = [
        f"| temperature | {head} |",
        "|---|" + "---|" * len(table),
        *(
            f"| {t:g} | " + " | ".join(f"{stats[i].mean_acceptance_length:.2f}" for stats in table.values()) + " |"
            for i, t in enumerate(TEMPERATURES)
        ),
    ]
    at_one = TEMPERATURES.index(1.0)
    positions = [
        f"| {name} | " + " | ".join(f"{rate:.2f}" for rate in stats[at_one].acceptance_rate_per_position) + " |"
        for name, stats in table.items()
    ]
    change = overtaken_from(table["argmax"], table["sample"])
    sentence = (
        f"From temperature {change:g} on, sampled drafts are accepted more than argmax drafts"
        if change is not None
        else "Sampled drafts never overtake argmax drafts here"
    )
    versions = f"Python {platform.python_version()}, jax {jax.__version__}, {jax.default_backend()}, float32"
    return f"""# Acceptance by temperature

Written by `python -m benchmarks.acceptance` ({versions}).

The shipped family, K = {K}: tokens per pass of the target, the bonus or correction token included, so plain decoding is
1.00 and {K + 1}.00 is the most. {prompt_count} prompts of {PROMPT_TOKENS} tokens from standard-library files held out of
training, {max_tokens} new tokens each, no top-k, top-p or min-p. `argmax` and `sample` are verified by `rejection`.

{chr(10).join(lines)}

![acceptance length by temperature](acceptance.png)

At temperature 0 all of them are the same greedy comparison. An argmax draft passes with probability p(draft), which
falls as the target's law flattens; a sampled draft passes with the overlap of the two laws, the sum of min(p, q), which
stays high because the draft's law flattens too. {sentence};
`draft_sampling="auto"` changes over at `argmax_below` = {jspec.Speculation().argmax_below:g}. `block` accepts at least as
much as `rejection` in expectation; coupled drafts a little less than sampled ones, and in exchange the text does not
depend on the drafter.

Share of passes that accept draft 1 to {K} at temperature 1:

| | {" | ".join(str(i + 1) for i in range(K))} |
|---|{"---|" * K}
{chr(10).join(positions)}
"""


def plot(table: dict[str, list[jspec.Stats]], file: Path):
    """The table as lines."""
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, stats in table.items():
        axes.plot(TEMPERATURES, [s.mean_acceptance_length for s in stats], marker="o", label=name)
    axes.set(xlabel="temperature", ylabel="tokens per pass of the target", ylim=(1, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    batch = prompts(args.prompts)
    table = {}
    for column in columns():
        started = time.perf_counter()
        table[column.name] = measure(column, batch, args.max_tokens)
        lengths = " ".join(f"{stats.mean_acceptance_length:.2f}" for stats in table[column.name])
        print(f"{column.name:16s} {lengths}   {time.perf_counter() - started:.0f} s", flush=True)
    DOCS.mkdir(exist_ok=True)
    (DOCS / "acceptance.md").write_text(report(table, len(batch), args.max_tokens))
    plot(table, DOCS / "acceptance.png")


if __name__ == "__main__":
    main()
