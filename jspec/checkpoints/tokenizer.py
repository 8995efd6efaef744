"""The tokenizer of a checkpoint folder, read by transformers from copies of files that were looked at first."""

import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from jspec.checkpoints.folder import Folder
from jspec.checkpoints.json_files import LARGER, MAX_BYTES, read_bytes, reason_of, require_depth
from jspec.checkpoints.refusal import Refusal
from jspec.text import Tokenizer

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them makes a tokenizer
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
MODEL_KEYS = ("model_type", "tokenizer_class", "transformers_version")  # what a tokenizer asks config.json for
PROBE = "def f(x):\n\treturn 'é€ 1,000'  # ok"


def load_tokenizer(path: str | os.PathLike) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder, None if it has no tokenizer files. Runs no code from the folder.

    transformers reads what it finds, wherever links and settings lead. So it is given a temporary folder with copies of
    the few files that make a tokenizer, without settings that name other files.

    Raises:
      Refusal: a file is too large, leaves the folder, or is damaged; one sentence with the file and the reason.
    """
    folder = Folder(path)
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
        except BaseException as error:  # of many kinds; a panic of the Rust code in tokenizers is no Exception
            raise _refusal(folder, error, copies) from None
    tokenizer.name_or_path = folder.given  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def _read(copies: str) -> Tokenizer:
    # transformers would advise to install PyTorch, which tokenizers do not need.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer  # seconds to import, and token ids need no tokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoTokenizer.from_pretrained(copies, local_files_only=True, trust_remote_code=False)


def _contents(folder: Folder) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file of the tokenizer, and of what it asks config.json for."""
    for name in filter(folder.has, FILES):
        where, is_json = f"{folder.given}/{name}", name.endswith(".json")
        most = LARGER.get(name, MAX_BYTES) if is_json else MAX_TEXT_BYTES
        content = read_bytes(folder.path(name), where, most)
        if name == SETTINGS:
            settings = folder.json(name)
            content = json.dumps({key: value for key, value in settings.items() if not _names_a_file(key)}).encode()
        elif is_json:
            require_depth(content, where)
        yield name, content
    if folder.has("config.json"):
        raw = folder.json("config.json")
        texts = {key: raw[key] for key in MODEL_KEYS if isinstance(raw.get(key), str)}
        yield "config.json", json.dumps(texts).encode()


def _refusal(folder: Folder, error: BaseException, copies: str) -> Refusal:
    """What transformers said of the copies, in the name of the folder; of a file that is no JSON, that alone."""
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
    return key.endswith(("_file", "_files")) or key == "auto_map"
