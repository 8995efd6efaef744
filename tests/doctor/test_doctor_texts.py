"""``--texts`` of ``jspec doctor`` and ``jspec-convert``: how much worse a rounded model predicts a user's own texts."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
from engines import TARGET
from tiny import smallest

from convert import Mismatch, convert, load_folder
from convert.cli import main as convert_main
from jspec.checkpoints.tokenizer import load_tokenizer
from jspec.cli import main
from jspec.commands.demo import FAMILY
from jspec.doctor.texts import LONGEST_WINDOW, MOST_TOKENS, figures_of, rounded_cache_on_texts, windows_of

TEXTS = '''\
import os


def read_config(path):
    """Return the configuration in a file."""
    with open(path) as file:
        return json.load(file)
'''


class Letters:
    """A tokenizer of small letters, which begins every text with token 0."""

    bos_token_id = 0

    def encode(self, text: str) -> list[int]:
        return [0, *(ord(letter) - 96 for letter in text if letter.islower())]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text(TEXTS)
    return path


@pytest.fixture(scope="module")
def int8(tmp_path_factory):
    """The shipped target in int8, and what ``jspec-convert --verify logits --texts`` says of it."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("texts")
    (folder / "texts.txt").write_text(TEXTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers'
        report = convert(
            FAMILY / "target", folder / "int8", quantize="int8", verify="logits", texts=folder / "texts.txt"
        )
    return folder / "int8", list(report.notes)


def test_figures_by_hand():
    """Of tokens 2, 0, 1 the last two are predicted, by the logits of the first two."""
    p = np.array([[0.5, 0.25, 0.25], [0.1, 0.7, 0.2], [1 / 3] * 3])
    q = np.array([[0.25, 0.5, 0.25], [0.1, 0.7, 0.2], [1 / 3] * 3])
    found = figures_of([np.array([2, 0, 1])], [np.log(p)], [np.log(q)], "int8")
    assert (found.windows, found.tokens, found.changed) == (1, 2, 1)
    assert found.perplexities == pytest.approx(((0.5 * 0.7) ** -0.5, (0.25 * 0.7) ** -0.5))
    assert found.mean_kl == pytest.approx((0.5 * math.log(2) + 0.25 * math.log(0.5)) / 2)
    read, perplexity, kl, likeliest = found.sentences
    assert read.startswith("texts: 2 tokens are predicted, in 1 windows of at most 512")
    assert perplexity.startswith(
        "perplexity 1.69 of the original, 2.39 with int8 (+41.4%): a next token is as uncertain as"
    )
    assert kl.startswith(
        "KL(original || int8) 8.7e-02 nats a token: a token that the original draws is 8.30% less likely"
    )
    assert likeliest.startswith(
        "likeliest next token: 1 of 2 have another one with int8, 50.0 of 100: there a greedy text"
    )


def test_windows_of_texts(tmp_path):
    """Blank lines part texts; each window begins as a text does; a token alone predicts nothing; all is bounded."""

    def windows(content: str, name: str = "a.txt", **sizes) -> list[str]:
        (tmp_path / name).write_text(content)
        config: Any = TARGET if not sizes else Sizes(**sizes)
        found = windows_of(tmp_path / name, Letters(), config, "here")
        assert all(window[0] == 0 for window in found)
        return ["".join(chr(96 + token) for token in window[1:]) for window in found]

    assert windows("ab\nc\n \n  de\n\n\n7\n\nf") == ["abc", "de", "f"]
    assert windows('{"text": "ab", "prompt": "x"}\n{"prompt": "c\\n\\nd"}\n', "a.jsonl") == ["ab", "cd"]
    assert windows("abcdefgh", max_position=4) == ["abc", "def", "gh"]
    long = windows("a" * 600 + "\n\n" + "b" * 9000, max_position=2048)
    assert [len(window) + 1 for window in long[:3]] == [LONGEST_WINDOW, 600 - 511 + 1, LONGEST_WINDOW]
    assert sum(len(window) + 1 for window in long) == MOST_TOKENS


class Sizes:
    vocab_size = 29

    def __init__(self, max_position: int):
        self.max_position = max_position


def test_conversion_says_what_the_texts_lose(int8):
    """The perplexity of the original is that of transformers' own loss."""
    import torch
    from transformers import AutoModelForCausalLM

    *_, random, read, perplexity, kl, likeliest, decides = int8[1]
    assert random.startswith("KL(original || int8) mean")
    tokenizer: Any = load_tokenizer(FAMILY / "target")
    model: Any = AutoModelForCausalLM.from_pretrained(FAMILY / "target", dtype=torch.float32)
    loss, count = 0.0, 0
    for text in TEXTS.strip().split("\n\n\n"):
        tokens = torch.tensor([tokenizer.encode(text)])
        with torch.no_grad():
            loss += float(model(tokens, labels=tokens).loss) * (tokens.shape[1] - 1)
        count += tokens.shape[1] - 1
    assert read.startswith(f"texts: {count} tokens are predicted, in 2 windows")
    whole = math.exp(loss / count)
    assert perplexity.startswith(f"perplexity {whole:.2f} of the original, ")
    ours = float(perplexity.split(" with int8")[0].split()[-1])
    assert ours != pytest.approx(whole, rel=1e-4)
    assert ours == pytest.approx(whole, rel=0.1)
    assert 1e-5 < float(kl.split()[3]) < 1e-2
    assert f"of {count} have another one with int8" in likeliest
    assert decides.startswith("random tokens alone decide whether the verification passes")


def test_logits_that_are_not_finite_on_the_texts_fail(file, tmp_path, monkeypatch):
    """Tokens of the texts may reach what the random ones do not."""
    pytest.importorskip("torch")
    source = smallest(tmp_path / "src", dtype="bfloat16")
    infinite: list[int] = []

    def load(folder, dtype=None):
        config, params = load_folder(folder, dtype)
        table = params["embedding"] = np.array(params["embedding"])
        table[infinite] = np.nan
        return config, params

    monkeypatch.setattr("convert.verify.load_folder", load)
    monkeypatch.setattr("convert.verify.LENGTHS", (2,))
    given = {"verify": "logits", "texts": file}
    assert "decide" in convert(source, tmp_path / "out", **given).notes[-1]
    infinite.append(load_tokenizer(source).encode("(")[0])  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(Mismatch, match="logits of the bfloat16 weights are not finite on the texts"):
        convert(source, tmp_path / "other", **given)
    assert not (tmp_path / "other").exists()


def test_doctor_compares_with_the_original_on_texts(int8, file, capsys):
    """The same figures as those of the conversion: both compare with transformers on the original."""
    command = ["doctor", "--target", str(int8[0]), "--reference", str(FAMILY / "target"), "--texts", str(file)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main([*command, "--max-tokens", "4"]) in (0, 1)  # by its tolerance, for prompts
    out = capsys.readouterr().out
    for sentence in int8[1][-5:-1]:
        assert sentence.replace("float32", "int8") in out
    assert out.index("texts: ") < out.index("logits differ by at most")


def test_a_rounded_cache_on_texts(file, capsys):
    command = ["doctor", "--target", str(FAMILY / "target"), "--texts", str(file)]
    with pytest.warns(UserWarning, match="holds no .* scales of keys and values"):
        assert main([*command, "--kv-cache-dtype", "fp8"]) == 0
    out = capsys.readouterr().out
    assert "with a cache in fp8 (" in out
    per_token = rounded_cache_on_texts(FAMILY / "target", file, "fp8_per_token_head")
    assert per_token is not None
    assert per_token.mean_kl > 1e-6
    assert per_token.perplexities[0] != per_token.perplexities[1]
    assert f"perplexity {per_token.perplexities[0]:.2f} of the original" in out
    assert rounded_cache_on_texts(FAMILY / "target", file) is None


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("gone.txt", None, "gone.txt': expected a file of text in UTF-8 ([Errno 2] No such file"),
        ("a.txt", b" \n\n", "a.txt': expected a file with text in it"),
        (
            "a.txt",
            b"ab\xff",
            "a.txt': expected a file of text in UTF-8 ('utf-8' codec can't decode byte 0xff in position 2",
        ),
        ("a.txt", b"x", "a.txt': expected a text of at least two tokens"),
        ("a.jsonl", b'{"body": "x"}', "a.jsonl:1: expected an object with a text under 'text' or 'prompt'"),
    ],
)
def test_texts_that_cannot_be_used(tmp_path, capsys, name, content, words):
    pytest.importorskip("torch")
    source = smallest(tmp_path / "src")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    given = ["--texts", str(tmp_path / name)]
    assert convert_main([str(source), str(tmp_path / "out"), "--verify", "logits", *given]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert main(["doctor", "--target", str(source), "--reference", str(source), *given]) == 2
    assert words in capsys.readouterr().err


def test_texts_that_nothing_reads(file, tmp_path, capsys):
    pytest.importorskip("torch")
    source = smallest(tmp_path / "src")
    for more in ([], ["--verify", "shapes"], ["--verify", "logits", "--dry-run"]):
        with pytest.raises(SystemExit):
            convert_main([str(source), str(tmp_path / "out"), "--texts", str(file), *more])
        assert "needs --verify logits" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"texts='.*texts.txt': expected verify='logits' beside it"):
        convert(source, tmp_path / "out", texts=file)
    doctor = ["doctor", "--target", str(source), "--texts", str(file)]
    for more, words in (
        ([], "texts.txt': expected --reference beside it, the original, or a --kv-cache-dtype that rounds"),
        (["--exact"], "has no place beside --exact"),
    ):
        assert main([*doctor, *more]) == 2
        assert words in capsys.readouterr().err
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    assert convert_main([str(source), str(tmp_path / "out"), "--verify", "logits", "--texts", str(file)]) == 2
    assert "expected a tokenizer in" in capsys.readouterr().err
