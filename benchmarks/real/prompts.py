"""The prompts of ``prompts.jsonl``, as conversations."""

import json
import pathlib
from typing import NamedTuple

FILE = pathlib.Path(__file__).with_name("prompts.jsonl")
KINDS = ("code", "chat", "edits")


class Prompt(NamedTuple):
    """What a person asks for, and of which of ``KINDS`` that is."""

    kind: str
    text: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """A conversation of it alone."""
        return [{"role": "user", "content": self.text}]


def prompts(count: int | None = None) -> list[Prompt]:
    """The prompts, all or the first ``count``: one of each kind in turn."""
    read = [json.loads(line) for line in FILE.read_text().splitlines()]
    by_kind = [[Prompt(kind, one["prompt"]) for one in read if one["kind"] == kind] for kind in KINDS]
    return [prompt for three in zip(*by_kind, strict=True) for prompt in three][:count]
