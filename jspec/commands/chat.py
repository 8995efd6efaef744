"""``jspec chat``: a conversation in the terminal, or one line a turn from standard input."""

import argparse
import contextlib
import json
import pathlib
import sys
import time
from typing import Any

import jspec
from jspec.commands import generate
from jspec.commands.terminal import Screen, summary
from jspec.text.chat_template import read_template
from jspec.text.token_spans import TokenPieces

PROMPT = "> "
HELP = "Ctrl-C ends an answer, /reset forgets the conversation, Ctrl-D or /exit ends it."


def add_arguments(parser: argparse.ArgumentParser):
    """Declare the arguments, except those that ``jspec demo`` has too; ``cli`` declares these."""
    parser.add_argument("target", help="checkpoint folder of a chat model")
    parser.add_argument("--tools", metavar="FILE", help="JSON: a list of tools that the model may call, as for OpenAI")
    parser.add_argument("--plain", action="store_true", help="no colours for accepted drafts")
    generate.add_template_arguments(parser)
    generate.add_request_arguments(parser, max_tokens=None)


def run(args: argparse.Namespace, speculation: "jspec.Speculation") -> int:
    """Converse until the input ends; returns the exit code, 2 if a turn was refused and nobody was there to see it."""
    sampling = {"max_tokens": None, **generate.sampling(args)}
    jspec.SamplingParams(**sampling)  # before minutes go into loading
    tools = None if args.tools is None else read_tools(args.tools)
    template = None if args.chat_template is None else read_template(args.chat_template)
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):  # Windows has none
            import readline  # noqa: F401 - lets ``input`` edit lines, and find earlier ones
        print(f"loading and compiling {args.target} ...", file=sys.stderr, flush=True)
    llm = jspec.load(args.target, args.draft, speculation=speculation, max_batch=1, **generate.loading(args))
    session = Session(llm, args.system, {"tools": tools, "chat_template": template}, sampling, args.plain)
    llm.warmup()
    session.greet(interactive)
    while True:
        try:
            if not session.turn(interactive):
                break
        except KeyboardInterrupt:
            if not interactive:
                raise
            session.interrupted = True  # and nothing else, or a second Ctrl-C could come in between
    return 2 if session.refused and not interactive else 0


def read_tools(name: str) -> list[dict[str, Any]]:
    """The tools in a JSON file.

    Raises:
      ValueError: there is no such file, or it holds no list of objects.
    """
    try:
        tools = json.loads(pathlib.Path(name).read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"--tools {name}: cannot be read ({error.strerror}); expected a JSON file") from None
    except (ValueError, RecursionError):
        raise ValueError(f"--tools {name}: is no JSON; expected a list of tools") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"--tools {name}: expected a list of tools, {{'type': 'function', 'function': {{...}}}}")
    return tools


class Session:
    """A conversation, and the turn of it that is under way.

    Whatever ends a turn, the conversation stays as it was before, or has both sides of the turn: ``messages`` changes in
    one assignment.

    Args:
      llm: the model.
      system: the first message, which ``/reset`` keeps; None for none.
      options: the tools and the template, for ``LLM.chat_prompt``.
      sampling: fields of ``SamplingParams``.
      plain: no colours.

    Attributes:
      messages: what was said.
      interrupted: whether Ctrl-C ended the last turn, which the next one tidies up.
      refused: whether a turn was refused, because it was too long for example.

    Raises:
      ValueError: there is no template, or it does not take these messages.
    """

    def __init__(
        self, llm: "jspec.LLM", system: str | None, options: dict[str, Any], sampling: dict[str, Any], plain: bool
    ):
        self._llm, self._options, self._sampling, self._screen = llm, options, sampling, Screen(plain)
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._first)
        self.interrupted = self.refused = False
        self._asked: list[dict[str, str]] | None = None  # the messages that are being answered
        self._said: list[str] = []  # what of the answer has been shown
        llm.chat_prompt([*self._first, {"role": "user", "content": "x"}], **options)

    def greet(self, interactive: bool):
        """Say how to go on, and what the colours mean."""
        if interactive:
            self._screen.note(HELP)
        if self._llm.method is not None:
            self._screen.legend()

    def turn(self, interactive: bool) -> bool:
        """Read a line, and answer it; returns False at the end of the input."""
        self._tidy_up()
        line = self._line(interactive)
        if line is None or line.strip() == "/exit":
            return False
        if line.strip() == "/reset":
            self.messages = list(self._first)
            self._screen.note("the conversation is forgotten")
        elif line.strip():
            try:
                self._answer(line)
            except ValueError as error:
                self._refuse(error)
        return True

    def _answer(self, text: str):
        asked = [*self.messages, {"role": "user", "content": text}]
        self._said, self._asked = [], asked
        prompt, max_len = self._llm.chat_prompt(asked, **self._options), self._llm.engine.config.max_len
        if len(prompt) >= max_len:
            raise ValueError(
                f"the conversation has {len(prompt)} tokens, but max_len={max_len} leaves room for {max_len - 1} and one "
                "new token; /reset forgets the conversation, and --max-len gives room for a longer one"
            )
        request, result, start = self._llm.engine.request(prompt, **self._sampling), None, time.perf_counter()
        pieces = TokenPieces(self._llm.tokenizer, prompt)
        with contextlib.closing(self._llm.engine.stream(request)) as deltas:
            for delta in deltas:
                self._said.append(delta.text or "")
                self._screen.write(pieces.of(delta))
                result = delta.result
        seconds = time.perf_counter() - start
        self._screen.end_text()
        assert result is not None
        if result.finish_reason == "error":
            raise ValueError(f"the answer failed: {result.stop_reason}")
        self.messages = [*asked, {"role": "assistant", "content": result.text or ""}]
        self._asked = None
        self._screen.note(summary(result, seconds))

    def _refuse(self, error: ValueError):
        self.refused, self._asked = True, None
        print(f"jspec chat: {error}; the last turn is left out", file=sys.stderr, flush=True)

    def _tidy_up(self):
        """Keep what has been shown of an answer that Ctrl-C ended; forget a turn that got no answer."""
        asked, said, interrupted = self._asked, "".join(self._said), self.interrupted
        if asked is not None and said:
            self.messages = [*asked, {"role": "assistant", "content": said}]
        self._asked, self.interrupted = None, False
        if asked is not None:
            self._screen.end_text()
            self._screen.note("the answer ends here" if said else "no answer yet: the last turn is left out")
        elif interrupted:
            self._screen.leave_prompt()

    def _line(self, interactive: bool) -> str | None:
        """The next line of standard input without its end; None if there is none."""
        try:
            if not interactive:
                line = sys.stdin.readline()
            elif self._screen.is_terminal:
                line = f"{input(PROMPT)}\n"
            else:
                print(PROMPT, end="", file=sys.stderr, flush=True)
                line = sys.stdin.readline()
        except EOFError:
            line = ""
        except UnicodeDecodeError:
            raise ValueError("standard input: expected text in UTF-8") from None
        if interactive and not line:
            self._screen.leave_prompt()
        return line.rstrip("\r\n") if line else None
