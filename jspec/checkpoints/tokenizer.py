"""Loads the tokenizer of a checkpoint folder with transformers, from copies of its files that were checked first."""

import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.json_files import limit_of, reason_of, require_depth
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tiktoken import refuse_tiktoken
from jspec.checkpoints.gguf.vocabulary import GGUF
from jspec.text.detokenizer import Tokenizer

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # a folder with a tokenizer has one of these
SETTINGS = "tokenizer_config.json"
FILES = (
    *VOCABULARIES,
    SETTINGS,
    "special_tokens_map.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
)
MAX_TEXT_BYTES = 64 * 2**20  # of tokenizer.model, merges.txt and chat_template.jinja
MAX_REASON = 300  # characters
MODEL_KEYS = ("model_type", "tokenizer_class", "transformers_version")  # keys of config.json that AutoTokenizer reads
PROBE = "def f(x):\n\treturn 'é€ 1,000'  # ok"  # a text that a tokenizer has to encode and decode before it is returned


def load_tokenizer(path: str | os.PathLike | Folder) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder; None if it has no tokenizer files. No code from the folder runs.

    transformers follows links and settings that name files anywhere on the machine. So it is given a temporary folder
    with copies of the few files that a tokenizer consists of, without the settings that name other files.

    Raises:
      Refusal: a file is too large, lies outside the folder, or is damaged; one sentence with the file and the reason.
    """
    folder = path if isinstance(path, Folder) else Folder(path)
    refuse_tiktoken(folder)
    if not any(map(folder.has, VOCABULARIES)):
        return None
    with tempfile.TemporaryDirectory(prefix="jspec-") as copies:
        for name, content in _contents(folder):
            Path(copies, name).write_bytes(content)
        try:
            tokenizer = _read(copies)
            ids = tokenizer.encode(PROBE)
            tokenizer.decode(ids, skip_special_tokens=True)
            tokenizer.get_vocab()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # damage shows in many ways; a panic in tokenizers' Rust code is no Exception
            raise _refusal(folder, error, copies) from None
    tokenizer.name_or_path = folder.given  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def _read(copies: str) -> Tokenizer:
    # Without this, transformers advises to install PyTorch, which tokenizers do not need.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer  # imported here, because it takes seconds and token ids need no tokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(copies, local_files_only=True, trust_remote_code=False)
    # Some folders switch this on. It would change the text that the model wrote, for example " ." to ".".
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def _contents(folder: Folder) -> Iterator[tuple[str, bytes]]:
    """(name, content) of each tokenizer file, and of a config.json that is reduced to ``MODEL_KEYS``."""
    for name in filter(folder.has, FILES):
        if name == SETTINGS:
            settings = folder.json(name)
            yield name, json.dumps({k: value for k, value in settings.items() if not _names_a_file(k)}).encode()
            continue
        is_json = name.endswith(".json")
        content = folder.read(name, limit_of(name) if is_json else MAX_TEXT_BYTES)
        if is_json:
            require_depth(content, f"{folder.given}/{name}")
        yield name, content
    # Of some models, transformers would replace the rule by which the file says that texts are cut.
    from_gguf = folder.has(SETTINGS) and folder.json(SETTINGS).get(GGUF)
    if folder.has("config.json") and not from_gguf:
        raw = folder.json("config.json")
        texts = {key: raw[key] for key in MODEL_KEYS if isinstance(raw.get(key), str)}
        yield "config.json", json.dumps(texts).encode()


def _refusal(folder: Folder, error: BaseException, copies: str) -> Refusal:
    """The exception for a tokenizer that transformers cannot load.

    If a file is no valid JSON, the message says that. Otherwise it quotes the error of transformers, in which the path of
    the copies is replaced by the folder's.

    Args:
      folder: the checkpoint folder.
      error: what transformers raised.
      copies: path of the temporary folder with the copies.
    """
    held = [name for name in FILES if folder.has(name)]
    try:
        for name in held:
            if name.endswith(".json"):
                folder.json(name)
    except Refusal as refusal:
        return refusal
    reason = reason_of(error).replace(f"{copies}/", "").replace(copies, folder.given)[:MAX_REASON]
    printable = "".join(letter if letter.isprintable() else "?" for letter in reason)
    return Refusal(
        f"{folder.given}: {', '.join(held)} give no tokenizer that works ({type(error).__name__}: {printable}); fetch "
        "these files again"
    )


def _names_a_file(key: str) -> bool:
    """Whether the value under this key of tokenizer_config.json names files or code that transformers would read."""
    return key.endswith(("_file", "_files")) or key == "auto_map"
