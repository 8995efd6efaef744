"""Text as one long row of tokens, and the part of it that is kept from training."""

import hashlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

TEXT, LINES, ARRAYS = (".txt", ".py", ".md"), ".jsonl", ".npz"
SUFFIXES = (*TEXT, LINES, ARRAYS)
HELD_OUT = 1 / 50


class Corpus(NamedTuple):
    """Token ids ``[N]``, uint16 or int32, on the host."""

    train: np.ndarray
    held_out: np.ndarray


class Document(NamedTuple):
    """A text and what it is known by: its path, and its line in a file of several."""

    name: str
    text: str


def read_corpus(path: pathlib.Path, tokenizer: Any, vocab_size: int, eos_token_ids: tuple[int, ...], length: int):
    """A file or a folder as a ``Corpus``.

    Texts (.txt, .py, .md) are one document each; .jsonl has one a line, under ``text``, or under ``messages`` for the
    tokenizer's chat template; .npz has arrays ``train`` and ``held_out`` of token ids, as ``family.corpus`` writes
    them. Whole documents are held out, chosen by a hash of their names, so that the same data is always parted alike.

    Args:
      path: the file, or a folder that is searched.
      tokenizer: the target's, or None if it has none.
      vocab_size: V of the target.
      eos_token_ids: the target's; the first of them ends every document.
      length: tokens of a window, of which both parts must hold one.

    Raises:
      ValueError: names the file, and what would be right.
    """
    files = _files(path)
    if files[0].suffix == ARRAYS:
        corpus = _arrays(files[0])
    else:
        if tokenizer is None:
            raise ValueError(
                f"data={str(path)!r} is text, but the target has no tokenizer files; give token ids in an .npz"
            )
        corpus = _tokenised(path, files, tokenizer, eos_token_ids, length)
    for name, tokens in zip(Corpus._fields, corpus, strict=True):
        if len(tokens) <= length:
            raise ValueError(
                f"data={str(path)!r}: {len(tokens)} tokens to {'train on' if name == 'train' else 'hold out'}, and a "
                f"window takes {length + 1}; expected more text, or a smaller length"
            )
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            wrong = next(int(token) for token in tokens if not 0 <= token < vocab_size)
            raise ValueError(
                f"data={str(path)!r}: token id {wrong} in {name!r}, and the target's vocabulary has {vocab_size}; expected "
                "text, or ids made by the target's own tokenizer"
            )
    dtype = np.uint16 if vocab_size <= 2**16 else np.int32
    return Corpus(corpus.train.astype(dtype), corpus.held_out.astype(dtype))


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    kinds = ", ".join(SUFFIXES)
    if not path.exists():
        raise ValueError(f"data={str(path)!r} does not exist: expected a file ({kinds}) or a folder of such")
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files or files[0].suffix not in SUFFIXES:
        raise ValueError(f"data={str(path)!r}: expected a file ({kinds}) or a folder that holds some")
    arrays = [file for file in files if file.suffix == ARRAYS]
    if arrays and len(files) > 1:
        raise ValueError(f"{arrays[0]}: lies among {len(files) - 1} other files of data; expected it alone")
    return files


def _arrays(file: pathlib.Path) -> Corpus:
    with np.load(file) as stored:
        for name in Corpus._fields:
            if name not in stored:
                raise ValueError(f"{file}: has no array {name!r}; expected 'train' and 'held_out', token ids")
        corpus = Corpus(**{name: stored[name] for name in Corpus._fields})
    for name, tokens in zip(Corpus._fields, corpus, strict=True):
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(
                f"{file}: {name!r} is {tokens.dtype} {list(tokens.shape)}; expected one row of integers, token ids"
            )
    return corpus


def _tokenised(path: pathlib.Path, files: list[pathlib.Path], tokenizer, eos_token_ids: tuple[int, ...], length: int):
    root = path if path.is_dir() else path.parent
    documents = [document for file in files for document in _documents(root, file, tokenizer) if document.text]
    if not documents:
        raise ValueError(f"data={str(path)!r}: {len(files)} files, and all are empty; expected text")
    bar = tqdm(documents, desc="tokenising", unit="text", disable=None, leave=False)
    rows = [np.asarray([*tokenizer.encode(document.text), *eos_token_ids[:1]], np.int32) for document in bar]
    least = max(sum(map(len, rows)) * HELD_OUT, length + 1)
    if len(rows) == 1:
        return Corpus(rows[0][: -int(least)], rows[0][-int(least) :])
    chosen: set[int] = set()
    for index in sorted(range(len(rows)), key=lambda i: _hash(documents[i].name)):
        if sum(len(rows[i]) for i in chosen) >= least:
            break
        chosen.add(index)
    parts = ([row for i, row in enumerate(rows) if (i in chosen) == held_out] for held_out in (False, True))
    return Corpus(*(np.concatenate([np.zeros(0, np.int32), *part]) for part in parts))


def _documents(root: pathlib.Path, file: pathlib.Path, tokenizer) -> Iterator[Document]:
    try:
        text = file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: is no UTF-8 at byte {error.start}; convert it, or leave it out") from error
    name = file.relative_to(root).as_posix()
    if file.suffix != LINES:
        yield Document(name, text)
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield Document(f"{name}:{number}", _text_of(f"{file}:{number}", line, tokenizer))


def _text_of(where: str, line: str, tokenizer) -> str:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: is no JSON ({error.msg}); expected one object a line") from error
    if isinstance(entry, dict) and isinstance(entry.get("text"), str):
        return entry["text"]
    if not isinstance(entry, dict) or "messages" not in entry:
        raise ValueError(f"{where}: has no field 'text', a string, and no 'messages'; expected one of them")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"{where}: has 'messages', and the target's tokenizer has no chat template; expected 'text'")
    return tokenizer.apply_chat_template(entry["messages"], tokenize=False)


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()
