"""Reading training data: every kind of file, which documents are held out, and errors that name the file and the fix."""

import json

import numpy as np
import pytest
from tiny import tiny_checkpoint, tiny_tokenizer

from jspec.checkpoints.tokenizer import load_tokenizer
from jspec.train.data import Corpus, read_corpus

EOS = 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("target"), vocab_size=258)
    tiny_tokenizer(folder)
    return load_tokenizer(folder)


def read(path, tokenizer, length: int = 8, V: int = 258) -> Corpus:
    """``read_corpus`` with the toy's end-of-sequence id."""
    return read_corpus(path, tokenizer, V, (EOS,), length)


def documents(tokenizer, tokens: np.ndarray) -> list[str]:
    """The texts that ``tokens`` int ``[N]`` hold, each closed by an end-of-sequence token."""
    ends = np.flatnonzero(tokens == EOS)
    parts = np.split(tokens, ends + 1)
    assert len(parts[-1]) == 0  # the last document is closed too
    return [tokenizer.decode(part[:-1].tolist()) for part in parts[:-1]]


def test_whole_documents_are_held_out_and_their_names_decide_which(tmp_path, tokenizer):
    for i in range(40):
        (tmp_path / f"{i}.py").write_text(f"x = {i:04d}\n" * (i + 1))
    (tmp_path / "notes.rst").write_text("not read")
    corpus = read(tmp_path, tokenizer, length=50)
    train, held_out = (documents(tokenizer, part) for part in corpus)
    assert sorted(train + held_out) == sorted(f"x = {i:04d}\n" * (i + 1) for i in range(40))
    assert len(train) > len(held_out) > 0
    assert len(corpus.held_out) > 50
    assert corpus.train.dtype == np.uint16
    again = read(tmp_path, tokenizer, length=50)
    assert all(np.array_equal(a, b) for a, b in zip(corpus, again, strict=True))
    (tmp_path / "7.py").write_text("y" * 90)  # the name alone decides what is held out, not the text
    assert [len(part) for part in documents(tokenizer, read(tmp_path, tokenizer, 50).held_out)][:1] == [
        len(held_out[0])
    ]


def test_end_of_a_single_document_is_held_out(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("abcdefghij" * 50)
    corpus = read(tmp_path / "a.txt", tokenizer)
    assert tokenizer.decode(np.concatenate(corpus)[:-1].tolist()) == "abcdefghij" * 50
    assert len(corpus.held_out) == 501 // 50 == 10
    assert len(read(tmp_path / "a.txt", tokenizer, length=30).held_out) == 31


def test_each_line_of_a_jsonl_file_is_a_document(tmp_path, tokenizer):
    lines = [json.dumps({"text": letter * 30, "id": 3}) for letter in "abcdefgh"]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "", ""]))
    train, held_out = (documents(tokenizer, part) for part in read(tmp_path, tokenizer))
    assert sorted(train + held_out) == [letter * 30 for letter in "abcdefgh"]
    assert len(held_out) == 1


def test_conversations_go_through_the_chat_template(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    chat = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "hi"}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for _ in range(3)))
    assert documents(tokenizer, read(tmp_path, tokenizer).train) == ["[user]hello there[assistant]hi"] * 2


def test_arrays_of_token_ids_are_used_as_they_are(tmp_path):
    np.savez(tmp_path / "tokens.npz", train=np.arange(50, dtype=np.uint16), held_out=np.arange(20))
    for path in (tmp_path, tmp_path / "tokens.npz"):
        corpus = read(path, None, V=70_000)
        np.testing.assert_array_equal(corpus.train, np.arange(50))
        np.testing.assert_array_equal(corpus.held_out, np.arange(20))
        assert corpus.train.dtype == np.int32  # ids of this vocabulary need more than 16 bits


def _arrays(**arrays):
    return lambda folder: np.savez(folder / "t.npz", **arrays)


def _file(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


LONG = np.arange(40)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda folder: None, r"expected a file \(.txt, .py, .md, .jsonl, .npz\) or a folder that holds some"),
        (_file("a.csv", b"x"), "expected a file"),
        (_file("a.txt", b""), "1 files, and all are empty; expected text"),
        (
            _file("a.txt", b"short"),
            "tokens to hold out, and a window takes 9|0 tokens to train on, and a window takes 9",
        ),
        (_file("a.txt", b"\xff\xfe"), "a.txt': expected a file of text in UTF-8"),
        (_file("a.jsonl", b'{"text": "x"}\n{"t'), "a.jsonl:2: expected a JSON object"),
        (_file("a.jsonl", b'{"body": "x"}'), "a.jsonl:1: has no field 'text', a string, and no 'messages'"),
        (_file("a.jsonl", b"[1]"), "a.jsonl:1: expected a JSON object"),
        (_file("a.jsonl", b'{"messages": []}'), "tokenizer has no chat template; expected 'text'"),
        (_arrays(train=LONG), "t.npz: has no array 'held_out'"),
        (
            _arrays(train=LONG, held_out=LONG * 1.0),
            "'held_out' is float64.*; expected a one-dimensional array of integers",
        ),
        (_arrays(train=LONG, held_out=LONG[None]), r"'held_out' is int64 \[1, 40\]"),
        (_arrays(train=LONG, held_out=LONG + 230), "token id 258 in 'held_out', and the target's vocabulary has 258"),
        (_arrays(train=LONG[:8], held_out=LONG), "8 tokens to train on, and a window takes 9"),
    ],
)
def test_unusable_data_is_refused(tmp_path, tokenizer, write, message):
    write(tmp_path)
    with pytest.raises(ValueError, match=message):
        read(tmp_path, tokenizer)


def test_arrays_among_other_files_are_refused(tmp_path, tokenizer):
    _arrays(train=LONG, held_out=LONG)(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=r"t.npz: lies among 1 other files of data; expected it alone"):
        read(tmp_path, tokenizer)


def test_text_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="is text, but the target has no tokenizer files"):
        read(tmp_path, None)
