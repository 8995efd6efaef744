"""The largest values of every field of every request, generated from the request types, so that none can be forgotten."""

import json
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from jspec.serving.anthropic.protocol import CountTokensRequest, MessagesRequest
from jspec.serving.generation import protocol
from jspec.serving.openai.generate import GenerateRequest
from jspec.serving.responses_api.protocol import ResponsesRequest

PATHS = {
    "/v1/completions": protocol.CompletionRequest,
    "/v1/chat/completions": protocol.ChatRequest,
    "/inference/v1/generate": GenerateRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/tokenize": protocol.TokenizeRequest,
    "/tokenize of a chat": protocol.TokenizeChatRequest,
    "/detokenize": protocol.DetokenizeRequest,
}
LARGEST = 8 * 2**20 - 2**10  # bytes of a value; with the rest, the body is as large as it may be
MESSAGE = {"role": "user", "content": "A queue."}
NEEDED = {"prompt": "def ", "messages": [MESSAGE], "tokens": [1], "max_tokens": 16}
NEEDED |= {"token_ids": [1], "sampling_params": {"max_tokens": 16}}


def containers(annotation: Any) -> set[type]:
    """``list`` and ``dict``, as far as a field takes them, and ``str``."""
    inner = typing.get_args(annotation)
    own = {typing.get_origin(annotation) or annotation} & {list, dict, str}
    if annotation is Any:
        return {list, str}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {dict}
    return own if own else set().union(*map(containers, inner), set())


def fields() -> Iterator[tuple[str, str, set[type]]]:
    """(path, field, what it takes) for every field of every request that takes a text, a list or an object."""
    for path, kind in PATHS.items():
        for name, field in kind.model_fields.items():
            if found := containers(field.annotation):
                yield path, name, found


def filled(size: int, item: str, opening: str = "[", closing: str = "]") -> str:
    """JSON of as many items as fit."""
    return opening + ",".join([item] * (size // (len(item) + 1))) + closing


def floods(size: int) -> dict[str, str]:
    """Values of so many bytes, in JSON."""
    names = ",".join(f'"{i}":1' for i in range(size // 12))
    return {
        "numbers": filled(size, "7"),
        "texts": filled(size, '"a"'),
        "objects": filled(size, "{}"),
        "lists": filled(size, "[7]"),
        "names": f"{{{names}}}",
        "messages": filled(size, '{"role":"user","content":"x"}'),
        "parts": '[{"role":"user","content":' + filled(size, '{"type":"text","text":"x"}') + "}]",
        "one list": f"[{filled(size, '7')}]",
        "names of one": f'[{{"role":"user",{names}}}]',
        "text": '"' + "ab c" * (size // 4) + '"',
        "spaces": '"' + " " * size + '"',
    }


MANY = ("numbers", "texts", "objects", "lists", "names", "messages")  # which no field may have that has a limit


def body(path: str, name: str, value: str, **others: Any) -> bytes:
    """A body whose field has a value, which is JSON already."""
    needed = {key: item for key, item in NEEDED.items() if key in PATHS[path].model_fields and key != name}
    rest = json.dumps({**needed, **others})[1:-1]
    return f'{{"{name}":{value}{"," if rest else ""}{rest}}}'.encode()


def flooded(path: str, size: int, every: int) -> Iterator[tuple[str, str, str]]:
    """(field, name of a flood, JSON) for every n-th of the floods that each field of a path takes, beginning with another
    one for each field."""
    for index, (name, takes) in enumerate((name, takes) for where, name, takes in fields() if where == path):
        opening = {{list: "[", dict: "{", str: '"'}[kind] for kind in takes}
        taken = [(name, flood, value) for flood, value in floods(size).items() if value[0] in opening]
        yield from taken[index % every :: every]
