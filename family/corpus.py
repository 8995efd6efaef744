"""The corpus: the standard library of the running CPython, as two arrays of tokens.

    python -m family.corpus --out DIR

writes ``tokens.npz`` (uint16 arrays ``train`` and ``held_out``), the tokenizer, and ``corpus.json``, which says what
was read. The order is that of sorted paths and the split that of a hash of the path, so that the same Python gives the
same bytes.
"""

import argparse
import fnmatch
import hashlib
import json
import platform
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from family.configs import TARGET
from family.tokenizer import END_OF_TEXT_ID, save_tokenizer, train_tokenizer

# encodings holds generated character tables, a thousand pages of digits that teach no Python; _sysconfigdata and config
# are written when an interpreter is built, and say where.
LEFT_OUT = ("site-packages", "__pycache__", "encodings", "_sysconfigdata*", "config-*")
HELD_OUT_ONE_IN = 50


class Source(NamedTuple):
    """One file: its path relative to the library, with forward slashes, and its text."""

    path: str
    text: str


def read_sources(root: Path) -> list[Source]:
    """Every ``*.py`` under ``root`` that is UTF-8, in the order of its path."""
    sources = []
    for file in root.rglob("*.py"):
        path = file.relative_to(root)
        if any(fnmatch.fnmatch(part, pattern) for part in path.parts for pattern in LEFT_OUT):
            continue
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:  # the library tests its own decoders with such files
            continue
        if text:
            sources.append(Source(path.as_posix(), text))
    return sorted(sources)


def is_held_out(path: str) -> bool:
    """Whether the file is kept from training: one path in fifty, by SHA-256."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def digest(sources: list[Source]) -> str:
    """SHA-256 over each path and text, both closed by a zero byte."""
    sha = hashlib.sha256()
    for source in sources:
        sha.update(f"{source.path}\0{source.text}\0".encode())
    return sha.hexdigest()


def tokenise(tokenizer: Tokenizer, sources: list[Source]) -> np.ndarray:
    """All files in one row, each behind the end-of-text token that closes the one before; uint16."""
    encodings = tokenizer.encode_batch([source.text for source in sources])
    parts = [np.array([END_OF_TEXT_ID, *encoding.ids], np.uint16) for encoding in encodings]
    return np.concatenate([*parts, np.array([END_OF_TEXT_ID], np.uint16)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)

    sources = read_sources(Path(sysconfig.get_paths()["stdlib"]))
    train = [source for source in sources if not is_held_out(source.path)]
    held_out = [source for source in sources if is_held_out(source.path)]
    tokenizer = train_tokenizer(source.text for source in train)
    save_tokenizer(tokenizer, out, TARGET.max_position)
    tokens = {"train": tokenise(tokenizer, train), "held_out": tokenise(tokenizer, held_out)}
    np.savez_compressed(out / "tokens.npz", train=tokens["train"], held_out=tokens["held_out"])

    summary = {
        "source": f"{platform.python_implementation()} {platform.python_version()} standard library",
        "licence": "Python Software Foundation License Version 2",
        "sha256": digest(sources),
        "vocab_size": tokenizer.get_vocab_size(),
        "files": {"train": len(train), "held_out": len(held_out)},
        "bytes": {"train": utf8_bytes(train), "held_out": utf8_bytes(held_out)},
        "tokens": {name: len(row) for name, row in tokens.items()},
    }
    (out / "corpus.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))


def utf8_bytes(sources: list[Source]) -> int:
    return sum(len(source.text.encode()) for source in sources)


if __name__ == "__main__":
    main()
