"""Training data: files of text or token ids as one sequence for training and one that is held out."""

import hashlib
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from jspec.text.files import json_lines, read_utf8

TEXT, LINES, ARRAYS = (".txt", ".py", ".md"), ".jsonl", ".npz"
SUFFIXES = (*TEXT, LINES, ARRAYS)
HELD_OUT_SHARE = 1 / 50  # of all tokens


class Corpus(NamedTuple):
    """Token ids to train on and token ids that are held out, each ``[N]`` on the host, uint16 or int32."""

    train: np.ndarray
    held_out: np.ndarray


class Document(NamedTuple):
    """A text and its name: the path of its file relative to the data folder, with ``:line`` if it is a line of JSON."""

    name: str
    text: str


def read_corpus(path: pathlib.Path, tokenizer: Any, vocab_size: int, eos_token_ids: tuple[int, ...], length: int):
    """The token ids of a file, or of all files in a folder, as a ``Corpus``.

    What a file holds depends on its suffix:

    * .txt, .py, .md: one document.
    * .jsonl: one document per line, an object with the text under ``text``, or with a conversation under ``messages``,
      which goes through the tokenizer's chat template.
    * .npz: token ids in two arrays, ``train`` and ``held_out``, as ``recipes.corpus`` writes them. Such a file must be
      the only one.

    Of documents, about one token in fifty is held out, and at least one window. Whole documents are held out, and a hash
    of their names decides which, so the same data is always split in the same way. If there is only one document, its
    end is held out.

    Args:
      path: the file, or the folder, which is searched recursively.
      tokenizer: the target's tokenizer, or None if it has none.
      vocab_size: V of the target; every token id must be below it.
      eos_token_ids: the target's end-of-sequence ids. The first of them, if any, is appended to every document.
      length: tokens of a window. Each of the two sequences must have at least one more.

    Raises:
      ValueError: the data cannot be used. The message names the file and says what was expected.

    Example::

        from jspec.checkpoints.tokenizer import load_tokenizer

        corpus = read_corpus(pathlib.Path("path/to/texts"), load_tokenizer("path/to/target"), 32000, (2,), length=1024)
        print(len(corpus.train), len(corpus.held_out))
    """
    files = _files(path)
    if files[0].suffix == ARRAYS:
        corpus = _load_arrays(files[0])
    else:
        if tokenizer is None:
            raise ValueError(
                f"data={str(path)!r} is text, but the target has no tokenizer files; give token ids in an .npz"
            )
        corpus = _tokenise(path, files, tokenizer, eos_token_ids, length)
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
    """The files of data at ``path``, sorted: several of text, or a single .npz."""
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


def _load_arrays(file: pathlib.Path) -> Corpus:
    with np.load(file) as stored:
        for name in Corpus._fields:
            if name not in stored:
                raise ValueError(f"{file}: has no array {name!r}; expected 'train' and 'held_out', token ids")
        corpus = Corpus(**{name: stored[name] for name in Corpus._fields})
    for name, tokens in zip(Corpus._fields, corpus, strict=True):
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(
                f"{file}: {name!r} is {tokens.dtype} {list(tokens.shape)}; "
                "expected a one-dimensional array of integers, the token ids"
            )
    return corpus


def _tokenise(path: pathlib.Path, files: list[pathlib.Path], tokenizer, eos_token_ids: tuple[int, ...], length: int):
    """Tokenise the documents of text files, and split them into a ``Corpus`` (int32)."""
    root = path if path.is_dir() else path.parent
    documents = [document for file in files for document in _documents(root, file, tokenizer) if document.text]
    if not documents:
        raise ValueError(f"data={str(path)!r}: {len(files)} files, and all are empty; expected text")
    bar = tqdm(documents, desc="tokenising", unit="text", disable=None, leave=False)
    encoded = [np.asarray([*tokenizer.encode(document.text), *eos_token_ids[:1]], np.int32) for document in bar]
    min_held_out = max(sum(map(len, encoded)) * HELD_OUT_SHARE, length + 1)
    if len(encoded) == 1:
        return Corpus(encoded[0][: -int(min_held_out)], encoded[0][-int(min_held_out) :])
    chosen: set[int] = set()  # the documents that are held out
    for index in sorted(range(len(encoded)), key=lambda i: hashlib.sha256(documents[i].name.encode()).digest()):
        if sum(len(encoded[i]) for i in chosen) >= min_held_out:
            break
        chosen.add(index)
    splits = ([ids for i, ids in enumerate(encoded) if (i in chosen) == held_out] for held_out in (False, True))
    return Corpus(*(np.concatenate([np.zeros(0, np.int32), *split]) for split in splits))


def _documents(root: pathlib.Path, file: pathlib.Path, tokenizer) -> Iterator[Document]:
    """The documents of one file, named relative to ``root``."""
    name = file.relative_to(root).as_posix()
    if file.suffix != LINES:
        yield Document(name, read_utf8("data", file))
        return
    for where, entry in json_lines("data", file):
        yield Document(f"{name}:{where.rpartition(':')[2]}", _text_of(where, entry, tokenizer))


def _text_of(where: str, entry: dict[str, Any], tokenizer) -> str:
    """The text in a line of a .jsonl file; ``where`` is its file and line number, for error messages."""
    if isinstance(entry.get("text"), str):
        return entry["text"]
    if "messages" not in entry:
        raise ValueError(f"{where}: has no field 'text', a string, and no 'messages'; expected one of them")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"{where}: has 'messages', and the target's tokenizer has no chat template; expected 'text'")
    return tokenizer.apply_chat_template(entry["messages"], tokenize=False)
