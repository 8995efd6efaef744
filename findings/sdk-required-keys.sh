#!/usr/bin/env bash
# openai 3.57.0 and anthropic 2.14.0: the TypedDicts of requests say of no field that it is required.
#
# Text parts need "text" and "type", which are Required[..] in the SDKs' sources. Because these postpone the evaluation of annotations,
# __required_keys__ is empty and __optional_keys__ has all fields. typing.get_type_hints(.., include_extras=True) shows Required.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check anthropic==2.14.0 openai==3.57.0
"$folder/venv/bin/python" - <<'PY'
import typing

from anthropic.types import TextBlockParam
from openai.types.responses import ResponseInputTextParam

for kind in (ResponseInputTextParam, TextBlockParam):
    hints = typing.get_type_hints(kind, include_extras=True)
    required = {name for name, hint in hints.items() if typing.get_origin(hint) is typing.Required}
    print(kind.__name__, "__required_keys__:", set(kind.__required_keys__), "Required[..]:", required)
    assert not kind.__required_keys__ and {"text", "type"} <= required, "the behaviour has changed"
PY
