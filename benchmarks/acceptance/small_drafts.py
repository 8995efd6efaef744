"""What a drafter loses when its weights take eight bits or four, or when it knows a part of the vocabulary only: acceptance
lengths of the shipped family.

    python -m benchmarks.acceptance.small_drafts                        # all of them; a quarter of an hour on two cores
    python -m benchmarks.acceptance.small_drafts --only eagle --prompts 4
    python -m benchmarks.acceptance.small_drafts --weights int4         # one type of weights, with all tokens of a drafter

An acceptance length is the number of tokens that a round gives, by exact expectation under ``rejection`` with sampled
drafts, as in ``benchmarks.acceptance.drafters``, on the same prompts. A draft vocabulary is counted on the
standard-library files that the family was trained on. Keys of the result are ``<drafter>, <weights>``, with ``, <Vd>
tokens`` for a draft vocabulary. ``python -m benchmarks.tables`` writes the tables in docs/guides/quantization.md and
docs/guides/draft-vocabularies.md from it.
"""

import argparse
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.acceptance.drafters import PROMPT_TOKENS, K, expected, prompts
from benchmarks.report import results
from benchmarks.report.markdown import table
from convert import convert
from convert.folders import read_draft_config
from jspec.commands.demo import FAMILY, drafters
from recipes.corpus import is_held_out, read_sources

TEMPERATURES = (0.0, 1.0)
KINDS = ("bf16", "int8", "fp8", "int4")
SIZES = (1024, 512, 256)  # of draft vocabularies, of the family's 2,048 tokens
BASE = "int8"  # the weights of drafters with a draft vocabulary


def variants(name: str, weights: Sequence[str] | None = None) -> list[tuple[str, int | None]]:
    """(weights, size of the draft vocabulary) of what is measured of a drafter; None for the vocabulary that it has.

    With ``weights``, these alone, and no smaller vocabularies."""
    kinds: list[tuple[str, int | None]] = [(kind, None) for kind in weights or KINDS]
    if weights or read_draft_config(FAMILY / name).reduced:
        return kinds
    return [*kinds, *((BASE, size) for size in SIZES)]


def key_of(name: str, kind: str, size: int | None) -> str:
    return f"{name}, {kind}" if size is None else f"{name}, {kind}, {size} tokens"


def converted(name: str, kind: str, size: int | None, corpus: Path, folder: Path) -> Path:
    """The folder of a drafter of the family with such weights and such a vocabulary."""
    source = FAMILY / name
    if kind == "bf16" and size is None:
        return source
    borrows = name == "eagle" and size is not None
    vocabulary = {} if size is None else {"draft_vocabulary": size, "corpus": corpus}
    quantize = None if kind == "bf16" else kind
    target = FAMILY / "target" if borrows or (size is not None and name != "draft") else None
    return convert(source, folder / "converted", quantize=quantize, target=target, overwrite=True, **vocabulary).out


def corpus_in(folder: Path) -> Path:
    """The text that draft vocabularies are counted on, in a file of this folder."""
    sources = read_sources(Path(sysconfig.get_paths()["stdlib"]))
    file = folder / "corpus.txt"
    file.write_text("\n".join(one.text for one in sources if not is_held_out(one.path)), "utf-8")
    return file


def quantized_table(figures: dict[str, results.Figure]) -> str:
    """The table of docs/guides/quantization.md: acceptance lengths by the type of the drafter's weights."""
    columns = ("drafter", *(f"{kind}, at {t:g}" for t in TEMPERATURES for kind in KINDS))
    measured = [name for name in drafters(FAMILY) if key_of(name, KINDS[0], None) in figures]
    lengths = {name: [figures[key_of(name, kind, None)].details["lengths"] for kind in KINDS] for name in measured}
    rows = [
        (name, *(f"{one[i]:.2f}" for i in range(len(TEMPERATURES)) for one in all_)) for name, all_ in lengths.items()
    ]
    return table(columns, rows)


def vocabulary_table(figures: dict[str, results.Figure]) -> str:
    """The table of docs/guides/draft-vocabularies.md: acceptance lengths by the size of the draft vocabulary."""
    sizes = (None, *SIZES)
    columns = ("drafter", *(f"{size or 'all'} tokens, at {t:g}" for t in TEMPERATURES for size in sizes))
    rows = []
    for name in drafters(FAMILY):
        if key_of(name, BASE, SIZES[0]) in figures:
            lengths = [figures[key_of(name, BASE, size)].details["lengths"] for size in sizes]
            rows.append(
                (name, *(f"{by_temperature[i]:.2f}" for i in range(len(TEMPERATURES)) for by_temperature in lengths))
            )
    return table(columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--only", nargs="+", metavar="DRAFTER")
    parser.add_argument("--weights", nargs="+", choices=KINDS, help="these alone, and no smaller vocabularies")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the result, by default in benchmarks/results/")
    args = parser.parse_args()
    settings = {"num_draft_tokens": K, "prompts": args.prompts, "prompt_tokens": PROMPT_TOKENS}
    settings |= {"max_tokens": args.max_tokens, "temperatures": TEMPERATURES, "dtype": "float32"}
    result = results.begin("small_drafts", settings)
    file, batch = args.json or results.RESULTS / f"small_drafts-{result.day}.json", prompts(args.prompts)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        corpus = corpus_in(folder)
        for name in args.only or drafters(FAMILY):
            for kind, size in variants(name, args.weights):
                started, key = time.perf_counter(), key_of(name, kind, size)
                draft = converted(name, kind, size, corpus, folder)
                lengths = expected(draft, batch, args.max_tokens, TEMPERATURES)["rejection"]
                result.measured[key] = lengths[-1]
                result.details[key] = {"unit": "tokens", "more_is_better": True, "lengths": lengths}
                shown = ", ".join(f"{x:.2f}" for x in lengths)
                print(f"{key}: {shown} tokens a round; {time.perf_counter() - started:.0f} s", flush=True)
                results.write(result, file)
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
