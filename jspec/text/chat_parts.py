"""Messages whose content is a list of parts, for chat templates that write no other.

Templates of multimodal models go through the parts of a message, which are texts and images. Most of them take a text in
place of a list as well. What a template writes is found out by letting it render a message."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from jspec.text.deadline import TooSlow

MARK = "7f3a9c"  # the content of a message that is rendered to see whether it is written
# A loop over the content of a message, without which no template has use for parts.
_LOOP = re.compile(r"""\bin\s+[\w.]*(?:content\b|\[\s*['"]content['"]\s*\])""")

Renders = Callable[[Sequence[dict[str, Any]]], str]


def needs_parts(template: str, renders: Renders) -> bool:
    """Whether a template writes the content of messages only if it is a list of parts.

    Args:
      template: its text.
      renders: its text of a conversation. It may raise anything.

    Raises:
      TooSlow: the template does not end.
    """
    if not _LOOP.search(template):
        return False
    return not _writes(MARK, renders) and _writes([_part(MARK)], renders)


def in_parts(renders: Renders) -> Renders:
    """The same text of a conversation, whose messages are given with each text of a content as a list of one part."""
    return lambda messages: renders(
        [
            {**message, "content": [_part(text)]} if isinstance(text := message.get("content"), str) else dict(message)
            for message in messages
        ]
    )


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _writes(content: Any, renders: Renders) -> bool:
    try:
        return MARK in renders([{"role": "user", "content": content}])
    except TooSlow:
        raise
    except Exception:  # of many kinds
        return False
