"""The grammar of structured outputs in llguidance's format."""

import json
from typing import Any

from jspec.sampling.structured import StructuredOutputsParams
from jspec.text.grammar.schema import closed

# Between two parts of JSON: a newline and its indentation, or up to two spaces. llguidance allows any number of blanks, and
# small models write them up to ``max_tokens``. 40 are ten levels of four spaces, which is deeper than people's JSON is.
BLANKS = r"\n[ \t]{0,40}|[ ]{0,2}"


def grammar_text(asked: StructuredOutputsParams) -> str:
    """llguidance's grammar text for structured outputs."""
    text = _form(asked)
    if asked.preamble is None and asked.alternative is None:
        return text
    first, *others = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
    parts = {"preamble": asked.preamble, "alternative": asked.alternative}
    named = [{"name": name, "lark_grammar": part} for name, part in parts.items() if part is not None]
    before = "" if asked.preamble is None else "@preamble "
    form = "@form" if asked.alternative is None else "(@form | @alternative)"
    start = {"name": "start", "lark_grammar": f"start: {before}{form}"}
    return json.dumps({"grammars": [start, *named, {**first, "name": "form"}, *others]})


def _form(asked: StructuredOutputsParams) -> str:
    """The grammar text without the preamble."""
    from llguidance import LLMatcher

    if asked.json is not None or asked.json_object:
        options: dict[str, Any] = {}
        if asked.whitespace_pattern is not None:
            options["whitespace_pattern"] = asked.whitespace_pattern
        elif asked.disable_any_whitespace:
            options["whitespace_flexible"] = False
        usual = {} if options else {"whitespace_pattern": BLANKS}  # unless the schema itself says something
        schema = asked.json if asked.json is not None else json.dumps({"type": "object"})
        schema = "{}" if schema == "true" else schema  # which means the same, and has room for the options
        if asked.disable_additional_properties:
            schema = json.dumps(closed(json.loads(schema)))
        return LLMatcher.grammar_from_json_schema(schema, usual, options)  # type: ignore[arg-type]
    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(asked.regex)
    if asked.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in asked.choice))
    assert asked.grammar is not None
    return LLMatcher.grammar_from_lark(asked.grammar)
