"""Refuses vocabularies of tiktoken, which Kimi-K2 has, where nothing but code of the checkpoint says how text is split."""

from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal

FILE, READ_INSTEAD = "tiktoken.model", "tokenizer.json"


def refuse_tiktoken(folder: Folder):
    """Raise a ``Refusal`` if a tokenizer is in the form of tiktoken alone, without a ``tokenizer.json``."""
    if folder.has(FILE) and not folder.has(READ_INSTEAD):
        raise Refusal(
            f"{folder.given}/{FILE}: the rules of this tokenizer are Python code of the checkpoint, which jspec never runs; "
            f"write {READ_INSTEAD} beside it with the converter of transformers, as docs/guides/models.md shows"
        )
