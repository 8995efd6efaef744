"""The ``jspec`` command: what it prints, and one sentence and exit code 2 for every mistake."""

import re

import pytest
from tiny import tiny_checkpoint, tiny_tokenizer

import jspec
from jspec.cli import main


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    for name, seed in (("target", 0), ("draft", 1)):
        folder = tiny_checkpoint(
            root / name,
            seed=seed,
            vocab_size=258,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            head_dim=4,
            bos_token_id=0,
            eos_token_id=1,
        )
        tiny_tokenizer(folder)
    return root


def test_generate_prints_the_text_and_how_it_went(checkpoints, capsys):
    target = str(checkpoints / "target")
    settings = ["--max-tokens", "9", "--temperature", "0.9", "--top-p", "0.8", "--seed", "3"]
    assert main(["generate", target, "import os", "--draft", "ngram", "--num-draft-tokens", "2", *settings]) == 0
    out, err = capsys.readouterr()
    llm = jspec.load(target, "ngram", speculation=jspec.Speculation(2), max_batch=1)
    expected = jspec.generate(llm, "import os", temperature=0.9, top_p=0.8, seed=3, max_tokens=9)
    assert isinstance(expected, jspec.Result)
    assert out == f"{expected.text}\n"
    assert err == f"acceptance length {expected.stats.mean_acceptance_length:.2f}\n"


def test_drafts_that_are_chosen(checkpoints, capsys):
    chosen = ["--num-draft-tokens", "auto", "--max-draft-tokens", "1", "--max-tokens", "3"]
    assert main(["generate", str(checkpoints / "target"), "import os", "--draft", "ngram", *chosen]) == 0
    assert capsys.readouterr().err.startswith("acceptance length ")
    assert main(["demo", "--checkpoints", str(checkpoints), "--draft", "ngram", *chosen]) == 0
    assert re.search(r"K=auto \(\d\.\d\d\), rejection, auto", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "x"], "target='nowhere': expected a checkpoint folder"),
        (["{target}", ""], "prompt 0 is empty: expected at least one token"),
        (["{target}", "x" * 300], "prompt 0 has 300 tokens, but max_len=256"),
        (["{target}", "x", "--draft", "nowhere"], "draft='nowhere': expected a checkpoint folder"),
        (["{target}", "x", "--temperature", "-1"], "temperature=-1.0: expected"),
        (["{target}", "x", "--top-p", "0"], "top_p=0.0: expected"),
        (["{target}", "x", "--max-tokens", "0"], "max_tokens=0: expected"),
        (["{target}", "x", "--num-draft-tokens", "0"], "num_draft_tokens=0: expected"),
        (
            ["{target}", "x", "--draft-sampling", "coupled"],
            "draft_sampling='coupled' with verify='rejection' is biased",
        ),
    ],
)
def test_a_mistake_is_told_in_one_sentence(checkpoints, capsys, arguments, words):
    arguments = [argument.format(target=checkpoints / "target") for argument in arguments]
    assert main(["generate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jspec generate: ")
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize(
    "arguments",
    [[], ["generat"], ["generate", "x"], ["generate", "a", "b", "--verify", "c"], ["demo", "--num-draft-tokens", "x"]],
)
def test_usage_errors_exit_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: jspec" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"jspec {jspec.__version__}\n"


def test_demo_shows_text_and_figures(checkpoints, capsys):
    assert main(["demo", "--checkpoints", str(checkpoints), "--max-tokens", "5", "--num-draft-tokens", "2"]) == 0
    out = capsys.readouterr().out
    assert "class Queue:" in out
    for figure in ("acceptance length", "acceptance by position", "tokens per second", "measured ratio"):
        assert re.search(rf"{figure} +\S*\d", out), figure
    assert "K=2, rejection, auto" in out
    assert main(["demo", "--checkpoints", str(checkpoints), "--draft", "ngram", "--max-tokens", "3"]) == 0
    assert "drafted for by ngram" in capsys.readouterr().out
    assert main(["demo", "--checkpoints", str(checkpoints / "nowhere")]) == 2
    assert "expected a checkpoint folder" in capsys.readouterr().err


def test_demo_compares_every_drafter_beside_the_target(checkpoints, capsys):
    assert main(["demo", "--checkpoints", str(checkpoints), "--all", "--max-tokens", "3"]) == 0
    out = capsys.readouterr().out
    for name, method in (("draft", "draft_model"), ("ngram", "ngram")):
        assert re.search(rf"^ {name} +{method} +3 +\d\.\d\d .* \d+\.\d\d *$", out, re.MULTILINE), name
    assert main(["demo", "--checkpoints", str(checkpoints), "--all", "--draft", "ngram"]) == 2
    assert "leave out --draft ngram" in capsys.readouterr().err
