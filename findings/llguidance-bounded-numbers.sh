#!/usr/bin/env bash
# llguidance 1.9.1: a JSON schema's number that has a bound can no longer be written with an exponent.
#
# {"type": "number"} accepts 1e-5, and {"type": "number", "minimum": 0} does not, though 1e-5 is at least 0; 0.00001 is accepted
# by both. JSON Schema bounds the value, not how it is written. A model that prefers exponents is led to another number.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check llguidance==1.9.1
"$folder/venv/bin/python" - <<'PY'
import json

from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def accepts(schema, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


free, bounded = {"type": "number"}, {"type": "number", "minimum": 0}
seen = [accepts(schema, text) for schema in (free, bounded) for text in ("1e-5", "0.00001")]
print("1e-5 and 0.00001 without a bound:", seen[:2], "with minimum 0:", seen[2:])
assert seen == [True, True, False, True], "the behaviour has changed"
PY
