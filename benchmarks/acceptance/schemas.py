"""Completions that have to be JSON of a real schema: how many are invalid, and tokens a round with drafts.

    python -m benchmarks.acceptance.schemas              # until 10,000 have ended, an hour or more on two cores
    python -m benchmarks.acceptance.schemas --count 200

The schemas are those that pydantic writes for the types of OpenAI's and Anthropic's clients, 3,260 of up to 20,000
characters, in a random order that a seed fixes, again and again. The target and the draft model of the shipped family
know nothing of JSON, so that all but what a schema leaves no choice about is noise. Every completion that ends by itself
is parsed and validated by jsonschema, which shares no code with llguidance. Jump-forward tokens count as drafts.
"""

import argparse
import collections
import importlib
import inspect
import itertools
import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pydantic

import jspec
from benchmarks.report import results
from jspec.commands.demo import FAMILY

CLIENTS = "openai", "anthropic"
K, ROWS, MAX_LEN, MAX_TOKENS, CALL = 4, 64, 512, 256, 1024
PROMPT = "config = "
LARGEST = 20_000  # characters of a schema; longer ones are not asked for
TEMPERATURES = (0.0, 0.7, 1.0, 1.5)


def types() -> Iterator[type[pydantic.BaseModel]]:
    """Those that the clients define, in the order of their names."""
    for client in CLIENTS:
        package = importlib.import_module(f"{client}.types")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for _, value in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
                if issubclass(value, pydantic.BaseModel) and value.__module__ == module.name:
                    yield value


def schemas() -> list[dict[str, Any]]:
    """Of all types, each once."""
    by_text = {json.dumps(schema, sort_keys=True): schema for schema in (one.model_json_schema() for one in types())}
    return [schema for text, schema in by_text.items() if len(text) <= LARGEST]


def requests(seed: int) -> Iterator[tuple[dict[str, Any], jspec.SamplingParams]]:
    """Schemas in random order, over and over, and how a completion of each is sampled."""
    rng, known, number = np.random.default_rng(seed), schemas(), itertools.count()
    while True:
        for place in rng.permutation(len(known)):
            schema, one = known[place], next(number)
            form = jspec.StructuredOutputsParams(json=schema, disable_any_whitespace=True)
            params = jspec.SamplingParams(
                temperature=TEMPERATURES[one % len(TEMPERATURES)],
                seed=one,
                max_tokens=MAX_TOKENS,
                structured_outputs=form,
            )
            yield schema, params


def completed(llm: Any, call: list[tuple[dict[str, Any], jspec.SamplingParams]]) -> list[Any]:
    """The completion of each request; None where its schema is refused, before anything is computed for the others."""
    try:
        return llm.generate([PROMPT] * len(call), [params for _, params in call])
    except ValueError as error:
        if "structured_outputs" not in str(error):
            raise
        if len(call) == 1:
            print(f"refused: {error}"[:200], flush=True)
            return [None]
    half = len(call) // 2
    return completed(llm, call[:half]) + completed(llm, call[half:])


def fault_of(text: str, schema: dict[str, Any]) -> str | None:
    """What is wrong with a completion; None for a valid one."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--count", type=int, default=10_000, metavar="N", help="completions that have ended; %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="the result, by default in benchmarks/results/")
    args = parser.parse_args()
    result = results.begin("schemas", {"num_draft_tokens": K, "max_tokens": MAX_TOKENS, "seed": args.seed})
    file = args.json or results.RESULTS / f"schemas-{result.day}.json"
    llm: Any = jspec.load(
        *(FAMILY / "target", FAMILY / "draft"), num_draft_tokens=K, max_batch=ROWS, max_len=MAX_LEN, page_size=32
    )
    asked, seen, counts, tokens, rounds = requests(args.seed), set(), collections.Counter(), 0, 0
    while counts["stop"] < args.count:
        call = list(itertools.islice(asked, min(CALL, args.count)))
        for (schema, _), one in zip(call, completed(llm, call), strict=True):
            if one is None:
                counts["refused"] += 1
                continue
            tokens, rounds = tokens + len(one.token_ids), rounds + one.stats.num_steps
            counts[one.finish_reason] += 1
            if one.finish_reason == "stop":
                seen.add(json.dumps(schema, sort_keys=True))
                if (fault := fault_of(one.text, schema)) is not None:
                    counts["invalid"] += 1
                    print(schema.get("title"), one.text, fault, sep="\n  ", flush=True)
        print(f"{dict(counts)}, {tokens / rounds:.2f} tokens a round", flush=True)
        result.measured.update(
            {
                "ended": counts["stop"],
                "invalid": counts["invalid"],
                "cut off": counts["length"],
                "refused": counts["refused"],
                "schemas": len(seen),
                "tokens a round": tokens / rounds,
            }
        )
        results.write(result, file)  # a run that is stopped leaves what it has counted
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
