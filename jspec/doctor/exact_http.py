"""``prove_exact_over_http``: as ``prove_exact``, of a server that speaks OpenAI's protocol, as far as it shows there."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jspec._validation import require
from jspec.doctor.diagnosis import PROMPTS
from jspec.doctor.exact import Difference, Exactness, Way, Written, compared, scored

_PATIENCE, _SHOWN = 600, 300  # seconds that an answer may take, and characters of one that an error quotes


def prove_exact_over_http(
    url: str, model: str | None = None, prompts: Sequence[str] | None = None, *, max_tokens: int = 32
) -> Exactness:
    """Have a server complete prompts one by one, again, together and in other orders, and score its texts; count what
    differs.

    Log-probabilities are compared as the server writes them. The API key is that of OPENAI_API_KEY.

    Args:
      url: where the server answers, without ``/v1``.
      model: the name of a model; None takes the first that the server names.
      prompts: texts; None takes four built-in ones.
      max_tokens: how many new tokens each prompt gets at most.

    Raises:
      ValueError: the address is none, or nothing answers, or something that is no completion with log-probabilities.
    """
    known = url.startswith(("http://", "https://"))
    require(known, "url", url, "the address of a server, such as http://localhost:8000")
    server = _Server(url.rstrip("/").removesuffix("/v1"))
    name = model or server.first_model()
    texts = list(PROMPTS if prompts is None else prompts)
    common = {"model": name, "max_tokens": max_tokens, "logprobs": 1}
    seeded = [{"temperature": 1.0, "seed": i} for i in range(len(texts))]
    how = [*({"temperature": 0.0} for _ in texts), *seeded]
    requests = [{**common, "prompt": prompt, **one} for prompt, one in zip([*texts, *texts], how, strict=True)]
    expected = [server.complete(request) for request in requests]
    found = [
        compared(Way("again", True), expected, [server.complete(request) for request in requests]),
        compared(Way("together", True), expected, server.together(requests)),
        compared(Way("together, in reverse order", True), expected, server.together(requests[::-1])[::-1]),
    ]
    return Exactness((*found, *server.score(requests, expected)))


class _Server:
    """A server, by its address."""

    def __init__(self, url: str):
        self._url = url

    def first_model(self) -> str:
        try:
            return str(self._ask("/v1/models")["data"][0]["id"])
        except (LookupError, TypeError):
            raise ValueError(
                f"model=None: expected the name of a model, because {self._url}/v1/models has none"
            ) from None

    def complete(self, request: dict[str, Any]) -> Written:
        """The completion of a request; with ``echo``, of its prompt, too."""
        answer = self._ask("/v1/completions", request)
        try:
            said = answer["choices"][0]["logprobs"]
            numbers = [0.0 if number is None else float(number) for number in said["token_logprobs"]]
            return Written([str(token) for token in said["tokens"]], numbers)
        except (LookupError, TypeError, ValueError):
            shown = json.dumps(answer)[:_SHOWN]
            raise ValueError(
                f"{self._url}/v1/completions answers without log-probabilities of tokens: {shown}"
            ) from None

    def together(self, requests: Sequence[dict[str, Any]]) -> list[Written]:
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(self.complete, requests))

    def score(self, requests: Sequence[dict[str, Any]], texts: Sequence[Written]) -> list[Difference]:
        """What differs between texts and their scores, of those texts whose tokens the server reads again as it wrote them;
        [] if it reads none so, or has no ``echo``."""
        kept, scores = [], []
        for request, text in zip(requests, texts, strict=True):
            whole = {**request, "prompt": request["prompt"] + "".join(text.tokens), "echo": True, "max_tokens": 0}
            try:
                read = self.complete(whole)
            except ValueError:
                continue
            n = len(text.tokens)
            if n and list(read.tokens[-n:]) == list(text.tokens):
                kept.append(text)
                scores.append(read.numbers[-n:])
        return [scored(kept, scores)] if kept else []

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"content-type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            said = error.read(_SHOWN).decode(errors="replace")
            raise ValueError(f"{self._url}{path} answers HTTP {error.code}: {said}") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"no server of OpenAI's protocol answers at {self._url}{path}: {error}") from None
