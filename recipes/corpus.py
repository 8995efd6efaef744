"""The corpus: the standard library of the running CPython, as one array of tokens to train on and one held out.

    python -m recipes.corpus --out DIR

writes ``tokens.npz`` (uint16 arrays ``train`` and ``held_out``), the tokenizer, and ``corpus.json``, which records the
Python version, the number of files and tokens, and a SHA-256. Files are read in the order of their paths, and a hash of
the path decides which are held out, so the same Python gives the same bytes.
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

from recipes.configs import TARGET
from recipes.tokenizer import END_OF_TEXT_ID, save_tokenizer, train_tokenizer

# The files under encodings are generated tables of character codes, from which a model would learn digits and no Python.
# _sysconfigdata and config are written when an interpreter is built and contain the paths of that machine.
LEFT_OUT = ("site-packages", "__pycache__", "encodings", "_sysconfigdata*", "config-*")
HELD_OUT_ONE_IN = 50


class Source(NamedTuple):
    """A file's text, and its path relative to the root of the library, with forward slashes."""

    path: str
    text: str


def read_sources(root: Path) -> list[Source]:
    """All ``*.py`` files under ``root`` that are valid UTF-8 and not empty, sorted by path."""
    sources = []
    for file in root.rglob("*.py"):
        path = file.relative_to(root)
        if any(fnmatch.fnmatch(part, pattern) for part in path.parts for pattern in LEFT_OUT):
            continue
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:  # the library's tests contain invalid files on purpose
            continue
        if text:
            sources.append(Source(path.as_posix(), text))
    return sorted(sources)


def is_held_out(path: str) -> bool:
    """Whether the file is held out from training. The SHA-256 of its path selects about one file in fifty."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def digest(sources: list[Source]) -> str:
    """SHA-256 of all paths and texts. A zero byte follows each, so none can run into the next."""
    sha = hashlib.sha256()
    for source in sources:
        sha.update(f"{source.path}\0{source.text}\0".encode())
    return sha.hexdigest()


def tokenise(tokenizer: Tokenizer, sources: list[Source]) -> np.ndarray:
    """The tokens of all files as one sequence, uint16 ``[N]``, with an end-of-text token before, between and after them."""
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
        "tokens": {name: len(ids) for name, ids in tokens.items()},
    }
    (out / "corpus.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))


def utf8_bytes(sources: list[Source]) -> int:
    """Bytes of all texts in UTF-8."""
    return sum(len(source.text.encode()) for source in sources)


if __name__ == "__main__":
    main()
