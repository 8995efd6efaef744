#!/usr/bin/env bash
# anthropic 2.14.0 beside openai 3.57.0: clients of httpx, which the one takes, the other refuses.
#
# anthropic's SDK has moved to the package httpx2. http_client=httpx.AsyncClient(..), with which tests connect both SDKs to a server
# in the same process, raises a TypeError there. Both packages have httpx's interface, so httpx2.ASGITransport serves instead.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check anthropic==2.14.0 openai==3.57.0 httpx==0.28.1
"$folder/venv/bin/python" - <<'PY'
import anthropic
import httpx
import openai

openai.AsyncOpenAI(api_key="none", http_client=httpx.AsyncClient())
try:
    anthropic.AsyncAnthropic(api_key="none", http_client=httpx.AsyncClient())
except TypeError as error:
    print(error)
    assert "httpx2" in str(error), "the behaviour has changed"
else:
    raise SystemExit("the behaviour has changed: a client of httpx is taken")
PY
