"""Tokens per second of the shipped family, plain and with every way of drafting, at one program width.

    python -m benchmarks.family [--dtype bfloat16]

Greedy text must be the same in every line; the script exits 1 if it is not.
"""

import argparse
import functools
import operator
import statistics
import sys
import time

import jspec
from jspec.commands.demo import FAMILY, PROMPTS

K = 4
WAYS = (
    (None, "match", "auto"),
    ("draft", "rejection", "sample"),
    ("draft", "block", "sample"),
    ("draft", "match", "coupled"),
    ("ngram", "rejection", "auto"),
)


def timed(llm: jspec.LLM, params: jspec.SamplingParams, repeats: int) -> tuple[list[jspec.Result], float]:
    """Results, and the median of tokens per second over all prompts together."""
    rates, results = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        results = jspec.generate(llm, list(PROMPTS), params)
        assert isinstance(results, list)
        rates.append(sum(len(result.token_ids) for result in results) / (time.perf_counter() - start))
    return results, statistics.median(rates)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    settings = functools.partial(
        jspec.load, FAMILY / "target", max_batch=len(PROMPTS), max_len=256, page_size=32, dtype=args.dtype, width=K + 1
    )
    greedy = jspec.SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    sampled = jspec.SamplingParams(temperature=0.8, seed=0, max_tokens=args.max_tokens, ignore_eos=True)
    print(f"{'drafts':<8} {'verify':<10} {'sampling':<8}  greedy: length  tokens/s   temperature 0.8: length  tokens/s")
    texts = []
    for draft, verify, draft_sampling in WAYS:
        how = jspec.Speculation(num_draft_tokens=K, verify=verify, draft_sampling=draft_sampling)
        llm = settings(FAMILY / draft if draft == "draft" else draft, speculation=how).warmup()
        row = []
        for params in (greedy, sampled):
            results, rate = timed(llm, params, args.repeats)
            stats = functools.reduce(operator.add, (result.stats for result in results))
            row.append((stats.mean_acceptance_length, rate))
            if params is greedy:
                texts.append([result.token_ids for result in results])
        (cool, cool_rate), (warm, warm_rate) = row
        name = draft or "none"
        print(
            f"{name:<8} {verify:<10} {draft_sampling:<8} {cool:>15.2f} {cool_rate:>9.0f} {warm:>25.2f} {warm_rate:>9.0f}",
            flush=True,
        )
    same = all(text == texts[0] for text in texts)
    print("greedy text is the same in every line" if same else "GREEDY TEXT DIFFERS")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
