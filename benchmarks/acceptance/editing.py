"""Prompt lookup beside the drafters of the shipped family, where code is edited: tokens a round.

    python -m benchmarks.acceptance.editing                                  # ten to twenty minutes on two cores
    python -m benchmarks.acceptance.editing --only eagle3 --functions 300    # one drafter, on fewer tasks

A task is a function or a class and its edit. The prompt is the code as it stands, and behind it the first quarter, half or
three quarters of its edited copy, in which the name that occurs most is another one; the model goes on. The code is from the
standard library of the running CPython, the training files of the family among it, in an order that a seed decides. Every
completion has 32 tokens, all of them the target's own.

The target of the family is small. Asked to go on with a copy it takes the likeliest token rightly in four cases of five, so
that it has left most copies after a few tokens. A model that edits code does not, and lookups of a text that is not followed
are worth nothing. So there are two sets of tasks: ``any`` are the first tasks as they come; ``followed`` are all those whose
edited copy the target, greedily and without any drafts, continues word for word for 32 tokens. Every drafter has the same
prompts.

It writes a result into benchmarks/results/, from which ``python -m benchmarks.tables`` makes a section of
docs/results/drafters.md.
"""

import argparse
import ast
import collections
import keyword
import re
import sysconfig
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import jspec
from benchmarks.report import results
from benchmarks.report.markdown import paragraph, table
from jspec.commands.demo import FAMILY
from jspec.outputs import total_stats
from jspec.registry import NGRAM
from recipes.corpus import read_sources

DRAFTS, DRAFTERS = (4, 8), ("eagle3", "parallel", "draft", NGRAM)
TEMPERATURES = (0.0, 1.0)
MAX_TOKENS = 32
SIZES = range(60, 201)  # tokens of a function or a class
SHARES = (0.25, 0.5, 0.75)  # of the edited copy that the prompt has
FROM_A_FILE = 2  # tasks of one file do not outweigh the others
NAMES = re.compile(r"\b[a-z_][a-zA-Z_0-9]{2,}\b")
SETS = ("any", "followed")


class Task(NamedTuple):
    """Token ids: a prompt, and how the edited copy goes on, at least ``MAX_TOKENS`` of them."""

    prompt: list[int]
    continuation: list[int]


def pieces(seed: int) -> Iterator[tuple[str, str]]:
    """Functions and classes, each as the path of its file and its text, file after file in random order."""
    sources = read_sources(Path(sysconfig.get_paths()["stdlib"]))
    for i in np.random.default_rng(seed).permutation(len(sources)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in strings of old files
            try:
                tree = ast.parse(sources[i].text)
            except SyntaxError:  # some are invalid on purpose
                continue
        lines = sources[i].text.splitlines(keepends=True)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield sources[i].path, "".join(lines[node.lineno - 1 : node.end_lineno])


def tasks(tokenizer, functions: int, seed: int = 0) -> list[Task]:
    """The tasks of so many functions and classes, up to three of each."""
    found, taken = [], collections.Counter()
    for file, text in pieces(seed):
        names = collections.Counter(n for n in NAMES.findall(text) if not keyword.iskeyword(n) and n != "self")
        if taken[file] == FROM_A_FILE or not names or len(text) > 8 * max(SIZES):
            continue
        ids = tokenizer.encode(text)
        if len(ids) not in SIZES:
            continue
        taken[file] += 1
        ((name, _),) = names.most_common(1)
        edited = tokenizer.encode(re.sub(rf"\b{name}\b", f"new_{name}", text))
        for share in SHARES:
            place = int(share * len(edited))
            if len(edited) - place >= MAX_TOKENS:
                found.append(Task([*tokenizer.encode(text + "\n"), *edited[:place]], edited[place:]))
        if taken.total() == functions:
            break
    return found


def load(draft: str | None, K: int, lookup: bool = False) -> jspec.LLM:
    """The family's target with one of its drafters, with ngram, or alone."""
    folder = draft if draft in (None, NGRAM) else FAMILY / draft
    how = jspec.Speculation(K if draft else 0, lookup=lookup)
    with warnings.catch_warnings():  # heads that draft fewer are shown in the table as they are
        warnings.filterwarnings("ignore", "num_draft_tokens=", UserWarning)
        return jspec.load(FAMILY / "target", folder, speculation=how, max_batch=16, max_len=512, page_size=32)


def complete(llm: jspec.LLM, some: Sequence[Task], temperature: float) -> list[jspec.Result]:
    params = jspec.SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, ignore_eos=True)
    found = jspec.generate(llm, [task.prompt for task in some], params, key=jax.random.key(0))
    assert isinstance(found, list)
    return found


def tokens_per_round(llm: jspec.LLM, some: Sequence[Task], temperature: float) -> float:
    """Tokens of the completions, of which none has more than ``MAX_TOKENS``, over the rounds that made them."""
    done = complete(llm, some, temperature)
    stats = total_stats(one.stats for one in done)
    return sum(len(one.token_ids) for one in done) / stats.num_steps


def is_followed(task: Task, result: jspec.Result) -> bool:
    return result.token_ids == task.continuation[:MAX_TOKENS]


def measure(draft: str, K: int, sets: dict[str, list[Task]]) -> dict[str, dict[str, list[float]]]:
    """Set of tasks -> ``alone`` and ``beside`` -> tokens a round at each temperature. ngram has nothing to be beside."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in sets}
    for how in ("alone",) if draft == NGRAM else ("alone", "beside"):
        llm = load(draft, K, lookup=how == "beside")
        for name, some in sets.items():
            found[name][how] = [tokens_per_round(llm, some, t) for t in TEMPERATURES]
    return found


def markdown(result: results.Result) -> str:
    """A section of docs/results/drafters.md."""
    how, many = result.settings, result.settings["tasks"]
    rows = []
    for K, by_draft in result.measured.items():
        for draft, by_set in by_draft.items():
            for name in SETS:
                alone, beside = by_set[name]["alone"], by_set[name].get("beside")
                cells = [
                    f"{a:.2f}" if beside is None else f"{a:.2f}, {beside[i]:.2f}, **{beside[i] / a:.2f}**"
                    for i, a in enumerate(alone)
                ]
                rows.append((draft, K, f"{name}, {many[name]}", *cells))
    columns = ("drafter", "K", "tasks", *(f"temperature {t:g}" for t in TEMPERATURES))
    about = f"""`Speculation(lookup=True)` where code is edited, by `{result.current_command}` (jax {result.versions["jax"]},
    {result.device["kind"]}, float32). A prompt is a function or a class of {min(SIZES)} to {max(SIZES)} tokens and the
    beginning of a copy in which one name is another; the completion has {MAX_TOKENS} tokens. `any` are the first tasks as
    they come. The small target soon leaves most copies for a text of its own. `followed` are those of {how["tried"]} tasks
    whose copy it continues word for word, greedily and without drafts. Cells are tokens a round: the drafter alone, with
    lookup beside it, and the ratio."""
    return "\n\n".join(["## Prompt lookup beside a drafter", paragraph(about), table(columns, rows)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", type=int, default=1000, help="of which tasks are made; %(default)s")
    parser.add_argument("--most", type=int, default=64, help="tasks of either set; %(default)s")
    parser.add_argument("--only", nargs="+", default=DRAFTERS, metavar="DRAFTER", help="of jspec/demo_models, or ngram")
    parser.add_argument("--drafts", type=int, nargs="+", default=DRAFTS, metavar="K")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the result, by default in benchmarks/results/")
    args = parser.parse_args()
    plain = load(None, 0)
    every = tasks(plain.tokenizer, args.functions)
    followed = [task for task, done in zip(every, complete(plain, every, 0.0), strict=True) if is_followed(task, done)]
    sets = {"any": every[: args.most], "followed": followed[: args.most]}
    settings = {"tried": len(every), "tasks": {name: len(some) for name, some in sets.items()}, "dtype": "float32"}
    settings |= {"max_tokens": MAX_TOKENS, "temperatures": TEMPERATURES, "smoke": args.functions < 100}
    result = results.begin("editing", settings)
    print(f"{len(every)} tasks, of which {len(followed)} are followed", flush=True)
    file = args.json or results.RESULTS / f"editing-{result.day}.json"
    for K in args.drafts:
        result.measured[str(K)] = {}
        for draft in args.only:
            started = time.perf_counter()
            result.measured[str(K)][draft] = found = measure(draft, K, sets)
            print(f"K = {K}, {draft}: {time.perf_counter() - started:.0f} s", found, flush=True)
            results.write(result, file)
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
