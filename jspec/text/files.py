"""Reads the prompts and texts in a user's file of UTF-8: one on each line, parted by blank lines, or as JSON lines."""

import json
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jspec._validation import require

LINES, PARAGRAPHS = r"\n", r"\n(?:[ \t]*\n)+"  # what parts the texts of a file


def read_utf8(field: str, file: pathlib.Path) -> str:
    """The text of a file; a ValueError that has it as the value of ``field`` if it is none."""
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{field}={str(file)!r}: expected a file of text in UTF-8 ({error})") from None


def json_or_none(text: str) -> Any:
    """What a text of JSON holds; None if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def json_lines(field: str, file: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(``path:line`` for error messages, JSON object) of each line that is not empty."""
    for number, line in enumerate(read_utf8(field, file).split("\n"), 1):
        if line.strip():
            if not isinstance(entry := json_or_none(line), dict):
                raise ValueError(f"{file}:{number}: expected a JSON object")
            yield f"{file}:{number}", entry


def read_texts(field: str, file: pathlib.Path, keys: Sequence[str], parted_by: str) -> list[str]:
    """The texts in a file that are not blank, parted by a regular expression; in a .jsonl file that of each line, under the
    first of ``keys`` that it has. A ValueError names the file as the value of ``field``, or its line."""
    if file.suffix == ".jsonl":
        texts = []
        for where, entry in json_lines(field, file):
            texts.append(next((entry[key] for key in keys if key in entry), None))
            if not isinstance(texts[-1], str):
                raise ValueError(f"{where}: expected an object with a text under {' or '.join(map(repr, keys))}")
    else:
        texts = re.split(parted_by, read_utf8(field, file))
    texts = [text.strip("\n") for text in texts if text.strip()]
    require(bool(texts), field, str(file), "a file with text in it")
    return texts


def read_prompts(file: pathlib.Path) -> list[str]:
    """The prompts in a file: one on each line that is not empty, in a .jsonl file under ``prompt`` or ``text``."""
    return read_texts("prompts", file, ("prompt", "text"), LINES)
