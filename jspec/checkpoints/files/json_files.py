"""Reads JSON files of a checkpoint. Their size and nesting depth are checked before anything is parsed."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from jspec.checkpoints.files.refusal import Refusal

MIB = 2**20
MAX_BYTES = MIB  # of a JSON file; parsed, it takes up to sixty times as much memory
LARGER = {  # file name -> limit in bytes, for the files that may be larger than MAX_BYTES
    "model.safetensors.index.json": 32 * MIB,  # has a line for each tensor
    "pytorch_model.bin.index.json": 32 * MIB,
    "manifest.json": 32 * MIB,  # has two lines for each file
    "tokenizer.json": 64 * MIB,  # the largest in use have 262,144 tokens and about 33 MiB
    "vocab.json": 16 * MIB,
    "added_tokens.json": 16 * MIB,
    "tokenizer_config.json": 16 * MIB,  # may list added tokens
    "_METADATA": 16 * MIB,  # written by Orbax, has a line for each array
}
MAX_DEPTH = 64


def limit_of(name: str) -> int:
    """How many bytes a JSON file of this name may have."""
    return LARGER.get(name, MAX_BYTES)


def parse_json(data: bytes, where: str) -> Any:
    """The JSON value in the bytes of a file: an object, a list, a string, a number, a boolean or None.

    Args:
      data: the bytes.
      where: the name of the file, for messages.

    Raises:
      Refusal: it nests deeper than ``MAX_DEPTH``, or is no JSON.
    """
    require_depth(data, where)
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except ValueError as error:
        raise Refusal(f"{where}: cannot be read as JSON ({reason_of(error)}); fetch it again") from None


def read_bytes(path: Path, where: str, most: int) -> bytes:
    """The content of the file ``path``, named ``where`` in messages.

    Raises:
      Refusal: the file has more than ``most`` bytes, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise Refusal(f"{where}: cannot be read ({reason_of(error)})") from None
    if len(data) > most:
        raise Refusal(f"{where}: is larger than {most // MIB} MiB, which no such file is; fetch it again")
    return data


def require_depth(data: bytes, where: str):
    """Raise a ``Refusal`` if a JSON text nests deeper than ``MAX_DEPTH``.

    Brackets outside strings are counted, so that nothing is parsed; the text need not be valid JSON."""
    brackets = _STRING.sub(b"", data).translate(None, _NO_BRACKETS)
    depth = np.cumsum(_STEPS[np.frombuffer(brackets, np.uint8)], dtype=np.int32).max(initial=0)
    if depth > MAX_DEPTH:
        raise Refusal(f"{where}: nests deeper than {MAX_DEPTH} levels, which no such file does; fetch it again")


_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = np.array([1 if byte in b"[{" else -1 for byte in range(256)], np.int8)


def reason_of(error: BaseException) -> str:
    """The message of an exception as one line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(text.split())


def _refuse_constant(text: str):
    raise ValueError(f"{text} is no JSON number")
