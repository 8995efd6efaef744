"""``jspec chat``, and ``jspec generate`` with --chat and --stream, with a model that says the same to everybody."""

import builtins
import io
import json
import re
import sys

import pytest
from chats import ANSWER, TEMPLATE, chat_llm, chat_tokenizer

import jspec
from jspec.cli import main
from jspec.commands import chat as chat_command

SAID = r"acceptance length \d\.\d\d, \d+% of \d+ drafts accepted, 11 tokens, \d+\.\d tokens/s\n"
WARM = r"jspec \w+: compiling\n(jspec \w+: (compiling|running) \d+ of \d+ programs \(\w+\) after \d+ s\n)*"
WARM += r"jspec \w+: all \d+ programs have run after \d+ s\n"


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return chat_llm(chat_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def loaded(monkeypatch, llm):
    """What the command calls ``jspec.load`` with; the model is loaded already, and lives through all tests."""
    calls = []

    def load(target, *args, **options):
        calls.append((target, *args, options))
        return llm

    monkeypatch.setattr(jspec, "load", load, raising=False)
    return calls


@pytest.fixture
def prompts(monkeypatch, llm):
    """The prompts that the model gets, as text."""
    seen, request = [], llm.engine.request

    def spy(prompt, *args, **options):
        seen.append(prompt if isinstance(prompt, str) else llm.tokenizer.decode(prompt))
        return request(prompt, *args, **options)

    monkeypatch.setattr(llm.engine, "request", spy)
    return seen


def chat(monkeypatch, text: str, *arguments: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return main(["chat", "folder", *arguments])


def test_each_line_of_a_pipe_is_a_turn(monkeypatch, capsys, loaded, prompts):
    assert chat(monkeypatch, "one\r\n\n /reset?\ntwo", "--system", "be", "--temperature", "0") == 0
    out, err = capsys.readouterr()
    assert out == f"{ANSWER}\n" * 3
    assert re.fullmatch(WARM + SAID * 3, err)
    first = "<s>[system:be][user:one]"
    second = f"{first}[assistant:{ANSWER}][user: /reset?]"
    assert prompts == [f"{first}>", f"{second}>", f"{second}[assistant:{ANSWER}][user:two]>"]
    speculation = jspec.Speculation(4)
    assert loaded == [("folder", None, {"speculation": speculation, "max_batch": 1})]


def test_reset_clears_and_exit_ends_the_conversation(monkeypatch, capsys, loaded, prompts):
    assert chat(monkeypatch, "one\n/reset\ntwo\n/exit\nthree\n", "--system", "be") == 0
    assert prompts == ["<s>[system:be][user:one]>", "<s>[system:be][user:two]>"]
    out, err = capsys.readouterr()
    assert out == f"{ANSWER}\n" * 2
    assert re.fullmatch(f"{WARM}{SAID}the conversation is cleared\n{SAID}", err)
    assert chat(monkeypatch, "") == 0
    out, err = capsys.readouterr()
    assert (out, bool(re.fullmatch(WARM, err))) == ("", True)


def test_tools_and_template_files_reach_the_chat_template(monkeypatch, capsys, loaded, prompts, tmp_path):
    (tmp_path / "tools.json").write_text('[{"name": "add"}]')
    (tmp_path / "t.jinja").write_text("é" + TEMPLATE)
    how = ["--tools", str(tmp_path / "tools.json"), "--chat-template", str(tmp_path / "t.jinja")]
    assert chat(monkeypatch, "x", *how) == 0
    assert prompts == ['é<s>{tools:[{"name": "add"}]}[user:x]>']


def test_options_are_those_of_generate(monkeypatch, capsys, loaded, llm):
    seen, request = [], llm.engine.request
    monkeypatch.setattr(
        llm.engine, "request", lambda prompt, **options: seen.append(options) or request(prompt, **options)
    )
    sampling = "--temperature 0.5 --top-k 3 --top-p 0.3 --min-p 0.4 --seed 7 --ignore-eos --min-tokens 2 --max-tokens 5"
    loading = "--max-len 12 --dtype bfloat16 --generation-config jspec --draft d --num-draft-tokens 2 --verify block"
    assert chat(monkeypatch, "x", *sampling.split(), *loading.split(), "--stop", "zz") == 0
    assert seen == [
        {"temperature": 0.5, "top_k": 3, "top_p": 0.3, "min_p": 0.4, "seed": 7, "ignore_eos": True, "min_tokens": 2}
        | {"max_tokens": 5, "stop": ["zz"]}
    ]
    speculation = jspec.Speculation(2, verify="block")
    options = {
        "max_len": 12,
        "dtype": "bfloat16",
        "generation_config": "jspec",
        "speculation": speculation,
        "max_batch": 1,
    }
    assert loaded == [("folder", "d", options)]
    assert capsys.readouterr().err.endswith(", ended by the length limit\n")
    chat(monkeypatch, "x")
    assert seen[-1] == {"max_tokens": None, "seed": 0}  # to the end of the context, the rest as the checkpoint has it


def test_too_long_turn_is_left_out(monkeypatch, capsys, loaded, prompts):
    assert chat(monkeypatch, f"one\n{'x' * 120}\n{'y' * 99999}\ntwo\n") == 2
    out, err = capsys.readouterr()
    assert out == f"{ANSWER}\n" * 2
    assert prompts == ["<s>[user:one]>", f"<s>[user:one][assistant:{ANSWER}][user:two]>"]
    assert re.search(
        r"^jspec chat: the conversation has \d+ tokens, but max_len=128 leaves room for 127 and one", err, re.M
    )
    assert re.search(
        r"^jspec chat: messages make a prompt of \d+ characters, .*; the last turn is left out$", err, re.M
    )


def test_failed_response_is_left_out(monkeypatch, capsys, loaded, prompts, llm):
    execute = llm.engine.runner.execute

    def fail_once(*_):
        monkeypatch.setattr(llm.engine.runner, "execute", execute)
        raise OSError("a broken device")

    monkeypatch.setattr(llm.engine.runner, "execute", fail_once)
    assert chat(monkeypatch, "one\ntwo\n") == 2
    out, err = capsys.readouterr()
    failed = "jspec chat: the response failed: OSError: a broken device; the last turn is left out\n"
    assert re.match(WARM + failed, err)
    assert (out, prompts[1]) == (f"\n{ANSWER}\n", "<s>[user:two]>")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "-1"], "temperature=-1.0: expected"),
        (["--tools", "nowhere"], "--tools nowhere: cannot be read (No such file or directory)"),
        (["--tools", "{folder}/bad.json"], "bad.json: is no JSON; expected a list of tools"),
        (["--tools", "{folder}/object.json"], "object.json: expected a list of tools"),
        (["--chat-template", "nowhere"], "chat_template='nowhere' cannot be read"),
        (["--chat-template", "{folder}/bad.jinja"], "chat_template, line 1: "),
        (["--chat-template", "{folder}/strict.jinja", "--system", "x"], "refuses them: no system message; change them"),
    ],
)
def test_mistakes_are_reported_before_the_first_turn(monkeypatch, capsys, loaded, tmp_path, arguments, words):
    (tmp_path / "bad.json").write_text("[")
    (tmp_path / "object.json").write_text("{}")
    (tmp_path / "bad.jinja").write_text("{{")
    (tmp_path / "strict.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}x"
    )
    assert chat(monkeypatch, "x\n", *(argument.format(folder=tmp_path) for argument in arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jspec chat: ")
    assert err.count("\n") == 1
    assert words in err
    assert bool(loaded) == ("jinja" in words or "line 1" in words or "refuses" in words)


def test_input_that_is_not_utf8_is_refused(monkeypatch, capsys, loaded):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8"))
    assert main(["chat", "folder"]) == 2
    assert "jspec chat: standard input: expected text in UTF-8" in capsys.readouterr().err


class Keyboard(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def typed(monkeypatch):
    """Has ``input`` give out lines, raise what is no line, and end."""
    monkeypatch.setenv("NO_COLOR", "1")

    def type_(*lines):
        monkeypatch.setattr(sys, "stdin", Keyboard())
        monkeypatch.setattr(sys, "stdout", Keyboard())  # a terminal
        left = list(lines)

        def read(prompt):
            assert prompt == chat_command.PROMPT
            line = left.pop(0) if left else EOFError
            if not isinstance(line, str):
                raise line
            return line

        monkeypatch.setattr(builtins, "input", read)
        return sys.stdout

    return type_


def interrupt(monkeypatch, llm, after: int):
    """Ctrl-C when so many deltas of the next answer have come; later answers go on to their end."""
    stream = llm.engine.stream

    def interrupted(request):
        for count, delta in enumerate(stream(request)):
            if count == after:
                monkeypatch.setattr(llm.engine, "stream", stream)
                raise KeyboardInterrupt
            yield delta

    monkeypatch.setattr(llm.engine, "stream", interrupted)


def test_ctrl_c_stops_a_response_and_keeps_the_conversation(monkeypatch, capsys, loaded, prompts, llm, typed):
    interrupt(monkeypatch, llm, after=1)
    screen = typed("one", "two", KeyboardInterrupt, "three")
    assert main(["chat", "folder"]) == 0
    cut = prompts[1].removeprefix("<s>[user:one][assistant:").removesuffix("][user:two]>")
    assert cut
    assert ANSWER.startswith(cut)
    assert cut != ANSWER
    assert prompts[2] == f"<s>[user:one][assistant:{cut}][user:two][assistant:{ANSWER}][user:three]>"
    said = f"{ANSWER}\nacceptance length"
    lines = screen.getvalue()
    assert lines.startswith(f"{chat_command.HELP}\n{cut}\nthe response ends here\n{said}")
    assert lines.count(said) == 2
    assert lines.endswith("\n\n")  # behind Ctrl-D
    assert llm.engine.metrics().num_running == 0


def test_ctrl_c_before_a_response_drops_the_turn(monkeypatch, capsys, loaded, prompts, llm, typed):
    interrupt(monkeypatch, llm, after=0)
    screen = typed("one", "two")
    assert main(["chat", "folder"]) == 0
    assert prompts == ["<s>[user:one]>", "<s>[user:two]>"]
    assert "no response yet: the last turn is left out\n" in screen.getvalue()


def test_ctrl_c_with_a_pipe_ends_the_command(monkeypatch, capsys, loaded, llm):
    interrupt(monkeypatch, llm, after=1)
    assert chat(monkeypatch, "one\ntwo\n") == 130
    assert re.fullmatch(WARM + "jspec chat: interrupted\n", capsys.readouterr().err)


def test_refused_turn_at_the_keyboard_exits_with_0(capsys, loaded, prompts, typed):
    typed("x" * 200, "two")
    assert main(["chat", "folder"]) == 0
    assert prompts == ["<s>[user:two]>"]
    assert "the last turn is left out" in capsys.readouterr().err


def test_prompt_goes_to_stderr_when_output_is_piped(monkeypatch, capsys, loaded):
    """The prompt is no part of what goes into the pipe."""
    keyboard = Keyboard("one\n")
    monkeypatch.setattr(sys, "stdin", keyboard)
    assert main(["chat", "folder"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{ANSWER}\n"
    assert re.search(rf"^{re.escape(chat_command.HELP)}\n> {SAID}> \n$", err, re.M)


def generated(capsys, *arguments: str) -> tuple[str, str]:
    assert main(["generate", "folder", *arguments]) == 0
    return capsys.readouterr()


def test_generate_streams_one_prompt(capsys, loaded, prompts):
    out, err = generated(capsys, "x>", "--stream", "--draft", "d", "--max-len", "64")
    assert (out, prompts) == (f"{ANSWER}\n", ["x>"])
    assert re.fullmatch(WARM + SAID, err)
    options = {"max_len": 64, "draft": "d", "speculation": jspec.Speculation(4), "max_batch": 1}
    assert loaded == [("folder", options)]
    out, err = generated(capsys, "x>", "--stream", "--stop", "€", "--max-tokens", "9")
    assert out == "hé\n"
    out, _ = generated(capsys, "hi", "--stream", "--chat", "--system", "be")
    assert (out, prompts[-1]) == (f"{ANSWER}\n", "<s>[system:be][user:hi]>")


def test_generate_applies_the_chat_template(monkeypatch, capsys, loaded, llm, tmp_path):
    out, err = generated(capsys, "hi", "--chat", "--max-tokens", "30")
    assert out == f"{ANSWER}\n"
    assert re.fullmatch(r"acceptance length \d\.\d\d\n", err)
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages | map(attribute='content') | join('|') }}>")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "bc"}\n')
    how = ["--chat", "--json", "--system", "be", "--chat-template", str(file)]
    out, _ = generated(capsys, *how, "--prompts", str(tmp_path / "prompts.jsonl"), "--max-tokens", "30")
    records = [json.loads(line) for line in out.splitlines()]
    found = [(record["prompt"], record["num_prompt_tokens"], record["text"]) for record in records]
    assert found == [("a", 5, ANSWER), ("bc", 6, ANSWER)]
    assert [options["max_batch"] for _, options in loaded] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x", "y", "--stream"], "--stream shows one prompt as it grows, and there are 2"),
        (["x", "--stream", "--json"], "--stream prints text as it comes, and --json"),
        (["x", "--plain"], "--plain turns off colours, which only --stream has"),
        (["x", "--system", "be"], "--system 'be' goes into a chat template: give --chat as well"),
        (["x", "--chat-template", "t"], "--chat-template 't' goes into a chat template: give --chat as well"),
        (["x", "--chat", "--chat-template", "nowhere"], "chat_template='nowhere' cannot be read"),
        (["--chat", "--prompts", "{folder}/ids.jsonl"], "--chat: expected prompts of text, and one is [5, 6]"),
        (["x", "--chat", "--top-p", "0"], "top_p=0.0: expected"),
        (["x", "--stream", "--top-p", "0"], "top_p=0.0: expected"),
    ],
)
def test_mistakes_are_reported_before_loading(capsys, loaded, tmp_path, arguments, words):
    (tmp_path / "ids.jsonl").write_text('{"prompt_token_ids": [5, 6]}\n')
    assert main(["generate", "folder", *(argument.format(folder=tmp_path) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert words in err
    assert loaded == []
