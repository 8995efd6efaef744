"""A thinking budget that is spent within a character, beside every form: the reasoning ends when the character is whole."""

import re

import numpy as np
import pytest
from marker_tokenizer import marker_tokenizer
from tiers import in_tiers
from transformers import PreTrainedTokenizerFast

from jspec.sampling.structured import StructuredOutputsParams
from jspec.sampling.thinking import ThinkingBudget
from jspec.text.grammar.grammars import Grammars
from jspec.text.parsers.forced import CallForms, after_reasoning
from jspec.text.parsers.lexer import MarkerTokens
from jspec.text.parsers.registry import REASONING_FORMATS, TOOL_FORMATS
from jspec.text.thinking import MISSING, BudgetConstraint, budget_constraint
from jspec.text.token_bytes import TokenBytes

KNOWN = PreTrainedTokenizerFast(tokenizer_object=marker_tokenizer().fast, eos_token="<|im_end|>")
MARKERS, GRAMMARS = MarkerTokens.of(KNOWN), Grammars(KNOWN, len(KNOWN), [KNOWN.eos_token_id])
WORDS = (len(KNOWN) + 31) // 32
THOUGHT = "aé€ 日本語😀👩‍👧z"  # characters of one to four bytes, each of which is a token
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["x"]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}]
HERMES = CallForms(TOOLS, TOOL_FORMATS["hermes"], MARKERS.ids, several=False)
FORMS = {
    "json": (StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True), r'\{"x":\d\}'),
    "json_object": (StructuredOutputsParams(json_object=True, disable_any_whitespace=True), r"\{.*\}"),
    "regex": (StructuredOutputsParams(regex="[0-9]{3}é"), r"\d{3}é"),
    "choice": (StructuredOutputsParams(choice=["yes", "né"]), "yes|né"),
    "grammar": (StructuredOutputsParams(grammar='start: "a" /[bc€]/'), "a[bc€]"),
    "forced call": (HERMES.calls(named=False).params, r"<tool_call>\n.*\n</tool_call>"),
    "forced call in JSON": (CallForms(TOOLS, None, MARKERS.ids, False).calls(named=False).params, r"\[ ?\{.*\} ?\]"),
    "form or calls": (HERMES.beside(StructuredOutputsParams(choice=["yes"])), "yes|<tool.*"),
    "strict tools": (HERMES.strict(), ".*"),
}


def bytes_of(token):
    return TokenBytes(KNOWN)(token, KNOWN.decode([token]))


def constraint_of(kind, thinks, most):
    """The constraint of a request whose prompt has opened the reasoning."""
    form, reasoning = FORMS[kind][0], REASONING_FORMATS[thinks]
    if kind != "strict tools":  # which leaves reasoning free by itself
        form = after_reasoning(form, reasoning, MARKERS.ids, f"x{reasoning.start}", kind.startswith("forced"))
    budget = ThinkingBudget(most, reasoning.start, reasoning.end, True)
    return budget_constraint(budget, KNOWN, bytes_of, [], GRAMMARS.constraint(form, [KNOWN.eos_token_id]))


def allowed_by(constraint, drafts=()):
    """The allowed tokens at the place of each draft, and behind the last."""
    flags = np.zeros((len(drafts) + 1, WORDS), np.uint32)
    constraint.allow(list(drafts), flags)
    return [set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))) for row in flags]


def written(constraint, thought):
    """A completion that thinks as long as it may and then ends as soon as it may, and what was allowed at each place."""
    ends, tokens, allowed = (KNOWN.eos_token_id, *KNOWN.encode("}")), list[int](), list[set[int]]()
    while len(tokens) < 200:
        [now] = allowed_by(constraint)
        assert now, f"no token behind {b''.join(map(bytes_of, tokens))}"
        forced = constraint.jump_forward(4)
        assert not forced or now == {forced[0]}
        wanted = thought[len(tokens) : len(tokens) + 1] if tokens == thought[: len(tokens)] else ()
        tokens.append(int(next((token for token in (*wanted, *ends) if token in now), min(now))))
        allowed.append(now)
        if constraint.add(tokens[-1:]) is not None or tokens[-1] == KNOWN.eos_token_id:
            return tokens, allowed
    raise AssertionError(f"the form does not end: {KNOWN.decode(tokens)}")


@pytest.mark.parametrize("thinks", ["qwen3", "seed_oss"])  # whose markers are one token, and many
@pytest.mark.parametrize("kind", in_tiers(FORMS, test=("json", "regex", "forced call", "strict tools")))
def test_reasoning_ends_when_its_last_character_is_whole(kind, thinks):
    thought, end = KNOWN.encode(THOUGHT), REASONING_FORMATS[thinks].end
    whole = [len(THOUGHT[:i].encode()) for i in range(len(THOUGHT) + 1)]
    for most in range(len(thought)):
        tokens, allowed = written(constraint_of(kind, thinks, most), thought)
        text = b"".join(map(bytes_of, tokens)).decode().removesuffix(KNOWN.eos_token)
        count = next(size for size in whole if size >= most)
        said = THOUGHT.encode()[:count].decode()
        assert text.startswith(said + end), (most, text)
        assert re.fullmatch(FORMS[kind][1], text.removeprefix(said + end).strip("\n"), re.DOTALL), (most, text)
        again = constraint_of(kind, thinks, most)  # with drafts, which may reach beyond the end of the reasoning
        for i in range(0, len(tokens) - 3, 3):
            assert allowed_by(again, tokens[i : i + 3])[:3] == allowed[i : i + 3], (most, i)
            again.add(tokens[i : i + 3])


def test_text_that_is_no_text_ends_as_well():
    """Without a form a model may begin characters without end."""
    begins = KNOWN.encode("€")[0]
    for most in range(3):
        constraint = BudgetConstraint(ThinkingBudget(most, begun=True), [7], bytes_of, True)
        for _ in range(most + (MISSING if most else 0)):
            assert constraint.jump_forward(4) == []
            constraint.add([begins])
        assert constraint.jump_forward(4) == [7]
