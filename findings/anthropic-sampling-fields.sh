#!/usr/bin/env bash
# anthropic 2.14.0: messages.create has no temperature, top_p and top_k any more.
#
# The Messages API had them from its beginning, and servers of that protocol read them. In this SDK the types of requests lack all three
# and messages.create(temperature=..) is a TypeError; extra_body still sends them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check anthropic==2.14.0
"$folder/venv/bin/python" - <<'PY'
import inspect
import typing

import anthropic
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming

fields = typing.get_type_hints(MessageCreateParamsNonStreaming)
arguments = inspect.signature(anthropic.Anthropic(api_key="none").messages.create).parameters
left = {name for name in ("temperature", "top_p", "top_k") if name in fields or name in arguments}
print("of temperature, top_p and top_k there are:", left or "none")
assert not left and "max_tokens" in fields and "extra_body" in arguments, "the behaviour has changed"
PY
