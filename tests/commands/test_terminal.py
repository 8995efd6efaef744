"""A text on the screen: in spans by who proposed its tokens, with colours only where they belong."""

import functools
import io

import pytest
from chats import chat_tokenizer

from jspec.commands.terminal import Screen, summary
from jspec.outputs import BONUS, CORRECTION, DRAFT, TARGET, Delta, Result, Stats
from jspec.text.detokenizer import Detokenizer
from jspec.text.token_spans import TokenSpans

TEXT = "a€é\U0001f600b"
COLOURED, BOLD, DIM, END = "\x1b[32m", "\x1b[1m", "\x1b[2m", "\x1b[0m"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def deltas_of(tokenizer, tokens, sources, sizes, held=0):
    """What an engine makes of tokens that come in groups of these sizes; the last ``held`` characters come at the end."""
    text = Detokenizer(functools.partial(tokenizer.decode, skip_special_tokens=True))
    start, deltas, waiting = 0, [], ""
    for size in sizes:
        waiting += text.add(tokens[start : start + size])
        finished = start + size >= len(tokens)
        waiting += text.held if finished else ""
        shown = waiting if finished else waiting[: max(len(waiting) - held, 0)]
        waiting = waiting[len(shown) :]
        chosen = slice(start, start + size)
        deltas.append(Delta(0, tokens[chosen], shown, finished, None, sources[chosen]))
        start += size
    return deltas


@pytest.mark.parametrize("sizes", [(11,), (1,) * 11, (3, 4, 4), (2, 5, 3, 1)])
@pytest.mark.parametrize("held", [0, 2, 50])
def test_spans_join_to_the_text_for_any_deltas(tokenizer, sizes, held):
    """A character of several tokens goes with the last of them."""
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    sources = [(DRAFT, CORRECTION)[token % 2] for token in range(len(tokens))]
    spans = TokenSpans(tokenizer, [])
    found = [span for delta in deltas_of(tokenizer, tokens, sources, sizes, held) for span in spans.of(delta)]
    assert len(tokens) == sum(sizes)
    by_letter = [(letter, source) for text, source in found for letter in text]
    assert by_letter == [("a", DRAFT), ("€", CORRECTION), ("é", CORRECTION), ("\U0001f600", CORRECTION), ("b", DRAFT)]


def test_spans_of_incomplete_characters_and_of_cut_texts(tokenizer):
    tokens = tokenizer.encode("ab€", add_special_tokens=False)[:-1]
    spans = TokenSpans(tokenizer, [])
    [delta] = deltas_of(tokenizer, tokens, [BONUS, DRAFT, BONUS, DRAFT], (4,))
    assert spans.of(delta) == [("a", BONUS), ("b", DRAFT), ("\N{REPLACEMENT CHARACTER}", DRAFT)]
    spans = TokenSpans(tokenizer, [])  # at a stop string
    assert spans.of(Delta(0, tokens[:2], "a", True, None, [DRAFT, BONUS])) == [("a", DRAFT)]


def test_spans_are_token_ids_without_a_tokenizer():
    spans = TokenSpans(None, [1])
    first = spans.of(Delta(0, [5, 6], None, False, None, [DRAFT, BONUS]))
    assert first == [("[5", DRAFT), (", 6", BONUS)]
    assert spans.of(Delta(0, [7], None, True, None, [DRAFT])) == [(", 7", DRAFT), ("]", TARGET)]
    assert TokenSpans(None, [1]).of(Delta(0, [], None, True)) == [("[]", TARGET)]


class Terminal(io.StringIO):
    """A terminal that remembers what it was shown."""

    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """A function that makes standard output a terminal; pytest would undo it between a fixture and its test."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def begin() -> Terminal:
        monkeypatch.setattr("sys.stdout", terminal := Terminal())
        return terminal

    return begin


def shown(terminal: Terminal, plain=False) -> str:
    screen = Screen(plain)
    screen.legend()
    screen.write([("def", DRAFT), ("\tf\n", TARGET), ("", DRAFT)])
    screen.end_text()
    screen.note("well")
    return terminal.getvalue()


def test_terminal_gets_colours(terminal):
    legend = f"{BOLD}drawn by the target{END}{DIM}, {END}{COLOURED}drafted and accepted{END}\n"
    assert shown(terminal()) == f"{legend}{COLOURED}def{END}{BOLD}\tf\n{END}{DIM}well{END}\n"


@pytest.mark.parametrize("off", ["plain", "NO_COLOR", "TERM"])
def test_colours_can_be_turned_off(terminal, monkeypatch, off):
    if off != "plain":
        monkeypatch.setenv(off, "dumb")
    assert shown(terminal(), plain=off == "plain") == "def\tf\nwell\n"


def test_pipe_gets_only_the_text(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    screen = Screen()
    screen.legend()
    screen.write([("a\x1b[2J\r", DRAFT), ("b\n", CORRECTION)])
    screen.end_text()
    screen.note("well")
    assert capsys.readouterr() == ("a\x1b[2J\rb\n\n", "well\n")


def test_control_codes_are_shown_as_symbols(terminal):
    out, screen = terminal(), Screen(plain=True)
    screen.write([("a\x1b]0;x\x07\r\x7f\x9b", BONUS)])
    screen.note("\x1b[2J")
    assert out.getvalue() == "a␛]0;x␇␍␡\N{REPLACEMENT CHARACTER}\n␛[2J\n"


def test_characters_that_the_encoding_lacks_are_replaced(monkeypatch):
    binary = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(binary, encoding="latin-1"))
    screen = Screen()
    screen.write([("é€\ud800", TARGET)])
    screen.end_text()
    assert binary.getvalue() == "é??\n".encode("latin-1")


def test_summary_has_acceptance_and_speed():
    def made(tokens, stats, reason):
        return summary(Result("", [0] * tokens, [], reason, None, stats, []), 2.0)

    drafted = made(9, Stats.of(3, [3, 3, 2], [3, 0, 2]), "length")
    assert (
        drafted == "acceptance length 2.67, 62% of 8 drafts accepted, 9 tokens, 4.5 tokens/s, ended by the length limit"
    )
    assert made(1, Stats.of(0, [0], [0]), "stop") == "acceptance length 1.00, no drafts, 1 token, 0.5 tokens/s"
