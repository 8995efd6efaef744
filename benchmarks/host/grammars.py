"""What structured output costs the host: a grammar until its first request can start, and a round of many requests.

    python -m benchmarks.host.grammars                 # a vocabulary of 64,000 tokens, trained on Python's library; minutes
    python -m benchmarks.host.grammars --vocabulary family  # the shipped family's 2,048 tokens, at once

For each grammar: milliseconds in which it is tried in a child process, compiled once more by this process, and found again
by a second request; then milliseconds of a round of ``--rows`` requests, whose drafts are what the grammar forces and, where
it forces nothing, the next tokens of a text that fits. ``llguidance alone`` is the same round as llguidance would make it,
which makes tokens of all that has to come, each time it is asked.

Nothing here needs a GPU. The device waits for this twice in a round of constrained requests (docs/guides/structured.md).
"""

import argparse
import json
import statistics
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import results
from benchmarks.report.markdown import table
from jspec.checkpoints.tokenizer import load_tokenizer
from jspec.commands.demo import FAMILY
from jspec.sampling.processors import num_words
from jspec.sampling.structured import StructuredOutputsParams
from jspec.text.grammar.constraint import GrammarConstraint
from jspec.text.grammar.grammars import Grammars
from jspec.text.grammar.matcher import make_matcher, prepare
from jspec.text.grammar.process import Trial
from jspec.text.grammar.source import grammar_text
from recipes.corpus import read_sources

K = 4
ROUNDS = 12
MOST_SECONDS = 10.0  # of the rounds of one grammar, but at least two
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "size": {"type": "integer"},
        "owner": {"type": "object", "properties": {"id": {"type": "string", "pattern": "^[a-f0-9]{8}$"}}},
    },
    "required": ["name", "tags", "size"],
}
FITTING = {"name": "a queue of words", "tags": ["red", "blue"] * 12, "size": 1234567, "owner": {"id": "0123abcd"}}
# Name -> the form, and a text that fits it.
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "JSON of a schema": ({"json": SCHEMA}, json.dumps(FITTING)),
    "any JSON": ({"json_object": True}, json.dumps(FITTING)),
    "a regular expression": ({"regex": "([a-z]+ )*[a-z]+"}, "the words of a sentence that goes on and on " * 6 + "end"),
    "a text of 1,000 characters": ({"choice": ["one of two " * 100]}, "one of two " * 100),
    "a text of 60,000 characters": ({"choice": ["one of two " * 5455]}, "one of two " * 5455),
}


def trained_tokenizer(size: int) -> Any:
    """A byte-level tokenizer of so many tokens, trained on Python's library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (source.text for source in read_sources(Path(sysconfig.get_paths()["stdlib"])))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def milliseconds_to_start(grammars: Grammars, form: StructuredOutputsParams) -> tuple[float, float, float]:
    """Of trying a grammar, of compiling it, and of finding it again."""
    text, tokens = grammar_text(form), grammars._tokens
    started = time.perf_counter()
    grammars._process.try_out(text, grammars.limits, Trial())
    tried = time.perf_counter()
    prepare(make_matcher(tokens, text))
    compiled = time.perf_counter()
    grammars.constraint(form, [0])
    before = time.perf_counter()
    grammars.constraint(form, [0])
    return 1e3 * (tried - started), 1e3 * (compiled - tried), 1e3 * (time.perf_counter() - before)


def constraint(grammars: Grammars, form: StructuredOutputsParams) -> GrammarConstraint:
    return grammars.constraint(form, [0])


class LlguidanceAlone(GrammarConstraint):
    """Asks llguidance for every mask, and for all tokens that have to come."""

    def jump_forward(self, most: int) -> list[int]:
        return self._matcher.compute_ff_tokens()[:most]

    def _forced_tokens(self) -> Sequence[int]:
        return ()


def llguidance_alone(grammars: Grammars, form: StructuredOutputsParams) -> GrammarConstraint:
    ours = grammars.constraint(form, [0])
    return LlguidanceAlone(ours._matcher, ours._tokens, ours._vocab_size, [0])


def milliseconds_of_a_round(constraints: Sequence[GrammarConstraint], text: Sequence[int], vocab_size: int) -> float:
    """Of what the host does in a round of so many requests: the median over the rounds of a text."""
    flags, place, seconds = np.empty((len(constraints), K + 1, num_words(vocab_size)), np.uint32), 0, []
    while place + K < len(text) and len(seconds) < ROUNDS and (len(seconds) < 2 or sum(seconds) < MOST_SECONDS):
        started = time.perf_counter()
        flags.fill(2**32 - 1)
        for constraint, allowed in zip(constraints, flags, strict=True):
            drafts = constraint.jump_forward(K) or text[place : place + K]
            constraint.allow(drafts, allowed)
        new = text[place : place + K]
        for constraint in constraints:
            constraint.add(new)
        place += K
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", default="64000", metavar="N", help="tokens, or the family's; %(default)s")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--only", nargs="+", metavar="GRAMMAR", choices=FORMS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="the result, by default in benchmarks/results/")
    args = parser.parse_args()
    family = args.vocabulary == "family"
    tokenizer: Any = load_tokenizer(FAMILY / "target") if family else trained_tokenizer(int(args.vocabulary))
    vocab_size = len(tokenizer.get_vocab())
    settings = {"vocab_size": vocab_size, "rows": args.rows, "num_draft_tokens": K, "rounds": ROUNDS}
    result = results.begin("grammars", settings)
    grammars = Grammars(tokenizer, vocab_size, [tokenizer.eos_token_id])
    grammars.start()
    lines = []
    for name in args.only or FORMS:
        fields, fitting = FORMS[name]
        form, text = StructuredOutputsParams(**fields), tokenizer.encode(fitting)
        figures = dict(zip(("tried", "compiled", "found again"), milliseconds_to_start(grammars, form), strict=True))
        ours, theirs = (
            milliseconds_of_a_round([follow(grammars, form) for _ in range(args.rows)], text, vocab_size)
            for follow in (constraint, llguidance_alone)
        )
        figures |= {"round": ours, "round, llguidance alone": theirs}
        for key, value in figures.items():
            result.measured[f"{name}, {key}"] = value
            result.details[f"{name}, {key}"] = {"unit": "ms"}
        lines.append((name, *(f"{value:.2f}" for value in figures.values())))
        print(lines[-1], flush=True)
    columns = ("grammar", "tried", "compiled", "found again", f"round of {args.rows}", "the same, llguidance alone")
    print(table(columns, lines))
    file = args.json or results.RESULTS / f"grammars-{result.day}.json"
    results.write(result, file)
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
