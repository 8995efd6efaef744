"""Tokens a round inside forced tool calls and outside, with the drafters of the shipped family.

    python -m benchmarks.acceptance.calls                   # a few minutes on two cores
    python -m benchmarks.acceptance.calls --only draft

The prompts are functions of the standard library. Behind each of them the target either goes on freely, or has to call
one of three tools in the syntax of Hermes. The family knows nothing but Python, so the values of a call are what a
model without any idea of it writes; the rest of a call has to come, and jump-forward tokens say so. Without them the
drafter's own drafts are all there is. Jump-forward tokens count as drafts.
"""

import argparse
import contextlib
import itertools
import json
import warnings
from collections.abc import Iterator, Sequence
from unittest import mock

import jax

import jspec
from benchmarks.acceptance.editing import pieces
from benchmarks.report.markdown import table
from jspec.commands.demo import FAMILY
from jspec.outputs import total_stats
from jspec.text.grammar.constraint import GrammarConstraint
from jspec.text.parsers.forced import CallForms
from jspec.text.parsers.registry import tool_format

K, PROMPTS, MAX_TOKENS, PROMPT_TOKENS = 4, 32, 64, 100
DRAFTERS = ("draft", "eagle3", "parallel")
TEMPERATURES = (0.0, 1.0)
SHORT = {"type": "string", "maxLength": 24}
TOOLS = {
    "read_file": ("path", "encoding"),
    "edit_file": ("path", "old", "new"),
    "run_command": ("command", "directory"),
}


def tool(name: str, fields: Sequence[str]) -> dict:
    """A tool in OpenAI's form, all of whose arguments are short texts."""
    schema = {"type": "object", "properties": dict.fromkeys(fields, SHORT), "required": [*fields]}
    return {"type": "function", "function": {"name": name, "parameters": schema | {"additionalProperties": False}}}


@contextlib.contextmanager
def without_jump_forward() -> Iterator[None]:
    """Leave the drafter's drafts as they are."""
    with mock.patch.object(GrammarConstraint, "jump_forward", return_value=[]):
        yield


def tokens_per_round(llm: jspec.LLM, prompts: Sequence[Sequence[int]], temperature: float, form=None) -> float:
    """Of all completions together."""
    params = jspec.SamplingParams(
        temperature=temperature, max_tokens=MAX_TOKENS, ignore_eos=form is None, structured_outputs=form
    )
    done = jspec.generate(llm, [list(prompt) for prompt in prompts], params, key=jax.random.key(0))
    assert isinstance(done, list)
    stats = total_stats(one.stats for one in done)
    return sum(len(one.token_ids) for one in done) / stats.num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=DRAFTERS, metavar="DRAFTER", help="of jspec/demo_models")
    args = parser.parse_args()
    form = CallForms([tool(*one) for one in TOOLS.items()], tool_format("hermes"), {}, several=False).calls(named=False)
    assert form.format is tool_format("hermes"), json.dumps(TOOLS)
    rows = []
    for draft in args.only:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "num_draft_tokens=", UserWarning)
            how = jspec.Speculation(K)
            llm = jspec.load(
                FAMILY / "target", FAMILY / draft, speculation=how, max_batch=16, max_len=256, page_size=32
            )
        assert llm.tokenizer is not None
        texts = itertools.islice((text for _, text in pieces(0) if len(text) > 8 * PROMPT_TOKENS), PROMPTS)
        prompts = [llm.tokenizer.encode(text)[:PROMPT_TOKENS] for text in texts]
        for temperature in TEMPERATURES:
            free, inside = (tokens_per_round(llm, prompts, temperature, one) for one in (None, form.params))
            with without_jump_forward():
                plain = tokens_per_round(llm, prompts, temperature, form.params)
            rows.append((draft, f"{temperature:g}", f"{free:.2f}", f"{inside:.2f}", f"{plain:.2f}"))
            print(rows[-1], flush=True)
    columns = ("drafter", "temperature", "free text", "inside a call", "inside, without jump-forward tokens")
    print(table(columns, rows))


if __name__ == "__main__":
    main()
