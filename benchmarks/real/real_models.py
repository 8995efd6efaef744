"""A real target with drafts of a real draft model, of lookup or of a head: how many are accepted, and how many tokens a
second that gives.

    python -m benchmarks.real.real_models path/to/target path/to/draft             # all; 25 minutes on an H200
    python -m benchmarks.real.real_models path/to/target path/to/head --only K=5   # some ways
    python -m benchmarks.real.real_models path/to/target path/to/draft --small     # a few tokens, any machine

A *way* is how drafts are made and verified: ``plain``; ``K=1`` to ``K=8`` and ``K=auto`` under ``rejection``;
``K=5, block`` and ``K=5, match``; ``ngram``; ``K=5, lookup``; of heads, ``tree of 32`` and ``tree of 10``. Of each way all
prompts are answered at once at temperatures 0, 0.7 and 1. The tokens of a round (1 without drafts) and the share of rounds
that accept each draft are counted by kind of
prompt, with a standard error by leaving out one prompt after another. Then 1, 16 and 64 requests at a time get as many
tokens each, at temperature 0 and 1, of which the tokens a second are the mean of three runs, prompts included, with its
standard error. All ways have answered all prompts before, so that these are in the prefix cache.

The result is written after each way into benchmarks/results/ or ``--json``, and ``python -m benchmarks.tables`` makes
docs/results/real-models.md of it."""

import argparse
import gc
import math
import pathlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax

import jspec
from benchmarks.real.prompts import KINDS, Prompt, prompts
from benchmarks.report import results
from jspec.outputs import Stats, total_stats
from jspec.train.run import HEAD_FOLDER

TEMPERATURES, TIMED_TEMPERATURES, ROWS, REPEATS = (0.0, 0.7, 1.0), (0.0, 1.0), (1, 16, 64), 3
NEW = 128  # tokens of an answer
ALONE = 6  # prompts that are answered one after another for a figure of one request
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    **{f"K={K}": {"num_draft_tokens": K} for K in (5, 3, 1, 2, 4, 6, 7, 8)},
    "K=5, block": {"num_draft_tokens": 5, "verify": "block"},
    "K=5, match": {"num_draft_tokens": 5, "verify": "match"},
    "ngram": {"draft": "ngram", "num_draft_tokens": 5},
    "K=5, lookup": {"num_draft_tokens": 5, "lookup": True},
    "K=auto": {"num_draft_tokens": "auto"},
    "tree of 32": {"tree": jspec.TreeShape(32, 6, 4)},
    "tree of 10": {"tree": jspec.TreeShape(10, 4, 2)},
}


def load(target: str, draft: str, way: str, small: bool, dtype: str) -> jspec.LLM:
    """The models, warmed up."""
    size = {"max_batch": 4, "max_len": 512} if small else {"max_batch": max(ROWS), "max_len": 1536}
    how = dict(WAYS[way] or {})
    drafter = None if WAYS[way] is None else how.pop("draft", draft)
    return jspec.load(target, drafter, dtype=dtype, **size, **how).warmup()


def name_of(path: str) -> str:
    """What tables call a model: its folder, of a head in the folder of its training that one."""
    at = pathlib.Path(path)
    return at.parent.name if at.name == HEAD_FOLDER else at.name


def answers(llm: jspec.LLM, asked: Sequence[Prompt], new: int, temperature: float, seed: int) -> list[jspec.Result]:
    """An answer of ``new`` tokens to each, whatever the model says of its end."""
    params = jspec.SamplingParams(temperature=temperature, max_tokens=new, ignore_eos=True)
    found = llm.chat([one.messages for one in asked], params, key=jax.random.key(seed))
    assert isinstance(found, list)
    return found


def tokens_a_round(stats: Sequence[Stats]) -> tuple[float, float]:
    """Of some answers together, and its standard error by the jackknife."""
    steps, accepted = ([getattr(s, name) for s in stats] for name in ("num_steps", "num_accepted_draft_tokens"))
    n, all_steps, all_accepted = len(stats), sum(steps), sum(accepted)
    without = [1 + (all_accepted - a) / (all_steps - s) for s, a in zip(steps, accepted, strict=True)]
    spread = sum((one - statistics.mean(without)) ** 2 for one in without)
    return 1 + all_accepted / all_steps, math.sqrt((n - 1) / n * spread)


def accepted(llm: jspec.LLM, asked: Sequence[Prompt], new: int) -> dict[str, Any]:
    """Temperature, kind -> tokens a round, their standard error, and the share of rounds that accept draft 1, 2, ..."""
    found = {}
    for temperature in TEMPERATURES:
        texts = answers(llm, asked, new, temperature, 0)
        for kind in (*KINDS, "all"):
            stats = [text.stats for one, text in zip(asked, texts, strict=True) if kind in (one.kind, "all")]
            total = total_stats(stats)
            mean, error = tokens_a_round(stats)
            positions = [round(n / total.num_steps, 4) for n in total.accepted_per_position]
            found[f"{temperature}, {kind}"] = {"tokens": mean, "error": error, "positions": positions}
    return found


def rates(llm: jspec.LLM, asked: Sequence[Prompt], new: int, rows: Sequence[int]) -> dict[str, Any]:
    """Temperature, requests at a time -> tokens a second and their standard error."""
    found = {}
    for temperature in TIMED_TEMPERATURES:
        for count in rows:
            turns = [[one] for one in asked[:ALONE]] if count == 1 else [(list(asked) * 2)[:count]]
            measured = []
            for repeat in range(REPEATS):
                began = time.perf_counter()
                for turn in turns:
                    answers(llm, turn, new, temperature, repeat)
                measured.append(new * sum(map(len, turns)) / (time.perf_counter() - began))
            error = statistics.stdev(measured) / math.sqrt(REPEATS)
            found[f"{temperature}, {count}"] = {"tokens": statistics.mean(measured), "error": error}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="folder or GGUF file")
    parser.add_argument("draft", help="that of a draft model or a draft head")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help="these ways")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="the result, by default in benchmarks/results/"
    )
    parser.add_argument("--small", action="store_true", help="a few tokens of a few prompts")
    args = parser.parse_args()
    asked, new, rows = (prompts(6), 16, (1, 4)) if args.small else (prompts(), NEW, ROWS)
    names = {"target": name_of(args.target), "draft": name_of(args.draft)}
    result = results.begin(
        "real_models", names | {"dtype": args.dtype, "prompts": len(asked), "new": new, "smoke": args.small}
    )
    file = args.json or results.RESULTS / f"real_models-{names['draft']}-{result.day}.json"
    for way in args.only:
        began = time.perf_counter()
        llm = load(args.target, args.draft, way, args.small, args.dtype)
        ready = time.perf_counter()
        measured: dict[str, Any] = {}
        if WAYS[way] is not None:
            measured["accepted"] = accepted(llm, asked, new)
        else:
            answers(llm, asked, 1, 0.0, 0)
        measured["rates"] = rates(llm, asked, new, rows)
        result.measured[way] = measured
        results.write(result, file)
        llm.close()
        del llm
        gc.collect()
        shown = [f"{key}: {one['tokens']:.2f}" for key, one in measured.get("accepted", {}).items() if "all" in key]
        shown += [f"{key}: {one['tokens']:.0f}/s" for key, one in measured["rates"].items()]
        print(
            f"{way}: ready in {ready - began:.0f} s, measured in {time.perf_counter() - ready:.0f}; {'; '.join(shown)}",
            flush=True,
        )
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
