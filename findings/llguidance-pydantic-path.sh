#!/usr/bin/env bash
# llguidance 1.9.1 with pydantic 2.14.4: the schema of a field of type pathlib.Path, or of bytes, has no grammar.
#
# pydantic writes {"type": "string", "format": "path"} and "format": "binary". JSON Schema (2020-12, validation, 7.2.3) has
# implementations take formats that they do not know for annotations. llguidance ends with "Unknown format: path".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check llguidance==1.9.1 pydantic==2.14.4
"$folder/venv/bin/python" - <<'PY'
import json
import pathlib

from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel


class File(BaseModel):
    path: pathlib.Path


class Blob(BaseModel):
    data: bytes


errors = []
for model in (File, Blob):
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(json.dumps(model.model_json_schema())))
    errors.append(matcher.get_error())
print(errors)
assert ["Unknown format: path" in errors[0], "Unknown format: binary" in errors[1]] == [True, True], "it has changed"
PY
