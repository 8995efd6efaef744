"""The ``jspec`` command: what it prints, and one sentence and exit code 2 for every mistake."""

import io
import json
import os
import re
import signal
import sys
import time
import weakref

import pytest
from tiny import smallest

import jspec
from jspec.cli import main


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    for name, seed in (("target", 0), ("draft", 1)):
        smallest(root / name, seed=seed)
    return root


def test_generate_prints_text_and_statistics(checkpoints, capsys):
    target = str(checkpoints / "target")
    settings = ["--max-tokens", "9", "--temperature", "0.9", "--top-p", "0.8", "--seed", "3"]
    assert main(["generate", target, "import os", "--draft", "ngram", "--num-draft-tokens", "2", *settings]) == 0
    out, err = capsys.readouterr()
    llm = jspec.load(target, "ngram", speculation=jspec.Speculation(2), max_batch=1)
    expected = jspec.generate(llm, "import os", temperature=0.9, top_p=0.8, seed=3, max_tokens=9)
    assert isinstance(expected, jspec.Result)
    assert out == f"{expected.text}\n"
    assert err == f"acceptance length {expected.stats.mean_acceptance_length:.2f}\n"


def test_lookup_is_an_option_beside_a_draft(checkpoints, capsys):
    """The newest four tokens of the prompt occur earlier in it."""
    target, prompt = str(checkpoints / "target"), "import os " * 3
    settings = ["--draft", str(checkpoints / "draft"), "--lookup", "--max-tokens", "3", "--temperature", "0"]
    assert main(["generate", target, prompt, *settings]) == 0
    out, _ = capsys.readouterr()
    llm = jspec.load(target, checkpoints / "draft", lookup=True, max_batch=1)
    assert llm.speculation == jspec.Speculation(lookup=True)
    expected = jspec.generate(llm, prompt, temperature=0, max_tokens=3)
    assert isinstance(expected, jspec.Result)
    assert out == f"{expected.text}\n"
    assert main(["generate", target, "x", "--lookup"]) == 2
    assert "lookup=True: expected draft= beside it" in capsys.readouterr().err


@pytest.fixture(scope="module")
def llm(checkpoints):
    return jspec.load(checkpoints / "target", max_batch=2)


@pytest.fixture
def calls(checkpoints, monkeypatch, llm):
    """What the command calls ``jspec.generate`` with; the model is loaded already, and lives through all tests."""
    seen, generate = [], jspec.generate

    def call(target, prompts, **options):
        seen.append((target, prompts, dict(options)))
        for name in ("draft", "speculation", "max_batch", "max_len", "dtype", "generation_config", "tensor_parallel"):
            options.pop(name, None)
        return generate(llm, prompts, **options)

    monkeypatch.setattr(jspec, "generate", call, raising=False)
    return seen


def generated(capsys, *arguments: str) -> str:
    assert main(["generate", *arguments]) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(r"acceptance length \d\.\d\d\n", err)
    return out


def texts(llm, prompts) -> list[str]:
    return [result.text for result in jspec.generate(llm, prompts, max_tokens=5, seed=0)]


def test_options_reach_the_library(capsys, calls):
    generated(capsys, "folder", "x")
    speculation = jspec.Speculation(4)
    default = {"draft": None, "speculation": speculation, "max_batch": 1, "max_tokens": 128, "seed": 0}
    assert calls.pop() == ("folder", ["x"], default)  # nothing else: the checkpoint's own defaults hold
    sampling = "--temperature 0.5 --top-k 3 --top-p 0.3 --min-p 0.4 --seed 7 --ignore-eos --min-tokens 2 --max-tokens 5"
    loading = "--max-len 12 --dtype bfloat16 --max-batch 3 --generation-config jspec --draft d --num-draft-tokens 0"
    loading += " --tensor-parallel 2"
    generated(capsys, "folder", "x", *sampling.split(), *loading.split(), "--stop", "a b", "--stop", "c")
    assert calls.pop()[2] == {
        **{"temperature": 0.5, "top_k": 3, "top_p": 0.3, "min_p": 0.4, "seed": 7, "ignore_eos": True},
        **{"min_tokens": 2, "max_tokens": 5, "max_len": 12, "dtype": "bfloat16", "max_batch": 3, "draft": "d"},
        **{
            "generation_config": "jspec",
            "speculation": jspec.Speculation(0),
            "stop": ["a b", "c"],
            "tensor_parallel": 2,
        },
    }


def test_prompts_on_the_command_line_are_printed_in_order(capsys, calls, llm):
    """Before options and after."""
    first, second = texts(llm, ["import os", "x"])
    out = generated(capsys, "folder", "import os", "--max-tokens", "5", "x")
    assert (
        out
        == f"==> prompt 0: 'import os' (length, 5 tokens)\n{first}\n==> prompt 1: 'x' (length, 5 tokens)\n{second}\n"
    )
    assert calls[-1][2]["max_batch"] == 2
    out = generated(capsys, "folder", *["a" * 100] * 9, "--max-tokens", "1")
    assert out.startswith(f"==> prompt 0: '{'a' * 55} ... (length, 1 tokens)\n")
    assert calls[-1][2]["max_batch"] == 8


def test_json_lines_are_prompts(capsys, calls, llm, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "import os", "id": 3}\n\n{"prompt_token_ids": [5, 6]}\n')
    out = generated(capsys, "folder", "x", "--prompts", str(file), "--json", "--max-tokens", "5")
    found = [json.loads(line) for line in out.splitlines()]
    assert [record["prompt"] for record in found] == ["x", "import os", [5, 6]]
    assert [record["text"] for record in found] == texts(llm, ["x", "import os", [5, 6]])
    numbers = [(record["index"], record["num_prompt_tokens"], record["num_tokens"]) for record in found]
    assert numbers == [(0, 1, 5), (1, 9, 5), (2, 2, 5)]
    assert found[0].keys() >= {"finish_reason", "stop_reason", "acceptance_length", "token_ids"}


def test_standard_input_holds_prompts(capsys, calls, monkeypatch, tmp_path):
    for arguments, given, expected in (
        (["-"], "import os\nx\n", ["import os\nx"]),
        (["--prompts", "-"], "import os\r\n\nx", ["import os", "x"]),
        (["a", "-"], "b", ["a", "b"]),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO(given))
        generated(capsys, "folder", *arguments, "--max-tokens", "1")
        assert calls.pop()[1] == expected
    (tmp_path / "prompts.txt").write_text("x\ny\n")
    generated(capsys, "folder", "--prompts", str(tmp_path / "prompts.txt"), "--max-tokens", "1")
    assert calls.pop()[1] == ["x", "y"]


def test_ctrl_c_in_a_callback_is_not_lost(capsys, monkeypatch):
    """Python drops what is raised there; JAX has a callback of the garbage collector, for example."""

    class Thing:
        pass

    def interrupted(*args, **kwargs):
        thing = Thing()
        watched = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
        del thing
        assert watched() is None
        time.sleep(10)

    monkeypatch.setattr(jspec, "generate", interrupted, raising=False)
    start, hook = time.perf_counter(), sys.unraisablehook
    assert main(["generate", "folder", "x"]) == 130
    assert time.perf_counter() - start < 5
    assert sys.unraisablehook is hook
    assert capsys.readouterr().err == "jspec generate: interrupted\n"


@pytest.mark.parametrize("stream", ["stdin", "stdout"])
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_closed_streams_are_refused(capsys, monkeypatch, calls, command, stream):
    """As after ``<&-`` or ``>&-`` in a shell."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("x"))
    monkeypatch.setattr(sys, stream, None)
    assert main([command, "folder", *(["-", "--stream"] if command == "generate" else [])]) == 2
    name = {"stdin": "standard input", "stdout": "standard output"}[stream]
    assert f"jspec {command}: {name} is closed: expected a terminal" in capsys.readouterr().err
    assert calls == []


@pytest.mark.parametrize("buffered", [True, False])
def test_a_reader_that_leaves_is_no_mistake(capsys, monkeypatch, calls, buffered):
    """As in ``jspec generate folder x | head -1``; unbuffered with ``PYTHONUNBUFFERED``."""
    read, write = os.pipe()
    os.close(read)
    with io.TextIOWrapper(open(write, "wb", buffering=-1 if buffered else 0), write_through=not buffered) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["generate", "folder", "x", "--max-tokens", "1"]) == 141
        monkeypatch.undo()
    assert len(calls) == 1
    assert "Broken pipe" not in capsys.readouterr().err


def test_input_that_is_not_utf8_is_refused(capsys, monkeypatch, calls):
    for arguments in (["-"], ["--prompts", "-"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\n"), encoding="utf-8"))
        assert main(["generate", "folder", *arguments]) == 2
        assert "jspec generate: standard input: expected text in UTF-8" in capsys.readouterr().err
    assert calls == []


def test_ctrl_c_prints_no_traceback(capsys, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(jspec, "generate", interrupt, raising=False)
    assert main(["generate", "folder", "x"]) == 130
    assert capsys.readouterr() == ("", "jspec generate: interrupted\n")


def test_auto_chooses_the_number_of_drafts(checkpoints, capsys):
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
        (["{target}", "x", "--num-draft-tokens", "-1"], "num_draft_tokens=-1: expected"),
        (["{target}", "x", "--top-k", "2147483648"], "top_k=2147483648: expected"),
        (["{target}", "x", "--stop", ""], "stop='': expected non-empty strings"),
        (["{target}", "x", "--max-len", "257"], "max_len=257: expected at most 256"),
        (["{target}", "x", "--max-batch", "0"], "max_batch=0: expected"),
        (["{target}", "-", "--prompts", "-"], "standard input can be read once"),
        (["{target}", "--prompts", "nowhere"], "--prompts nowhere: expected a file with a prompt a line"),
        (["{target}", "--prompts", "{target}/empty.txt"], "expected a prompt a line, and there is none"),
        (["{target}", "--prompts", "{target}/bad.jsonl"], 'bad.jsonl, line 2: expected a JSON object with "prompt"'),
        (["{target}", "--prompts", "{target}/model.safetensors"], "model.safetensors: expected text in UTF-8"),
        (
            ["{target}", "x", "--verify-budget", "0.5"],
            "verify_budget=0.5: expected None, 'auto', or a number of tokens",
        ),
        (
            ["{target}", "x", "--draft-sampling", "coupled"],
            "draft_sampling='coupled' with verify='rejection' is biased",
        ),
        (["{target}", "x", "--tree", "auto"], "tree='auto': draft is None, expected one of eagle, eagle3"),
        (
            ["{target}", "x", "--tree", "auto", "--num-draft-tokens", "0"],
            "num_draft_tokens=0: expected 'auto' or at least 1",
        ),
    ],
)
def test_mistakes_are_reported_in_one_sentence(checkpoints, capsys, arguments, words):
    (checkpoints / "target" / "empty.txt").write_text("\n\n")
    (checkpoints / "target" / "bad.jsonl").write_text('{"prompt": "x"}\n{"text": "x"}\n')
    arguments = [argument.format(target=checkpoints / "target") for argument in arguments]
    assert main(["generate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jspec generate: ")
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--num-draft-tokens", "'abc': expected an integer, or auto"),
        ("--verify-budget", "expected a number of tokens, or auto"),
        ("--tree", "'abc': expected nodes, depth and branch, 32,6,4 for example, or nodes alone, or auto"),
    ],
)
def test_values_that_are_no_numbers_are_refused(capsys, option, words):
    with pytest.raises(SystemExit):
        main(["generate", "nowhere", "x", option, "abc"])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["generat"],
        ["generate", "x"],
        ["generate", "a", "b", "--nonsense"],
        ["demo", "x"],
        ["generate", "a", "b", "--verify", "c"],
        ["demo", "--num-draft-tokens", "x"],
    ],
)
def test_usage_errors_exit_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: jspec" in capsys.readouterr().err


def test_version_is_printed(capsys):
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


@pytest.mark.nightly
def test_demo_compares_every_drafter_beside_the_target(checkpoints, capsys):
    assert main(["demo", "--checkpoints", str(checkpoints), "--all", "--max-tokens", "3"]) == 0
    out = capsys.readouterr().out
    for name, method in (("draft", "draft_model"), ("ngram", "ngram")):
        assert re.search(rf"^ {name} +{method} +3 +\d\.\d\d .* \d+\.\d\d *$", out, re.MULTILINE), name
    assert main(["demo", "--checkpoints", str(checkpoints), "--all", "--draft", "ngram"]) == 2
    assert "leave out --draft ngram" in capsys.readouterr().err
