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
from jspec.commands.reply import Reply, ReplyFormat
from jspec.commands.terminal import Screen, opened, summary
from jspec.commands.warming import warm_up
from jspec.text.chat_template import read_template

PROMPT = "> "
HELP = "Ctrl-C stops a response, /reset clears the conversation, Ctrl-D or /exit ends it."


def add_arguments(parser: argparse.ArgumentParser):
    """Declare the arguments, except those that ``jspec demo`` has too; ``cli`` declares these."""
    parser.add_argument(
        "target",
        help="checkpoint folder or GGUF file of a chat model, or its name on the hub, org/name[@revision][:Q4_K_M]",
    )
    parser.add_argument("--tools", metavar="FILE", help="JSON: a list of tools that the model may call, as for OpenAI")
    parser.add_argument("--plain", action="store_true", help="no colours for accepted drafts")
    generate.add_template_arguments(parser)
    generate.add_request_arguments(parser, max_tokens=None)


def run(args: argparse.Namespace) -> int:
    """Converse until the input ends; returns the exit code, 2 if a turn was refused and the input is not a terminal."""
    speculation, sampling = generate.speculation_of(args), {"max_tokens": None, **generate.sampling(args)}
    jspec.SamplingParams(**sampling)  # refuses bad values before the model is loaded, which takes minutes
    tools = None if args.tools is None else read_tools(args.tools)
    template = None if args.chat_template is None else read_template(args.chat_template)
    interactive = opened(sys.stdin, "standard input").isatty()
    opened(sys.stdout, "standard output")  # for answers
    if interactive:
        with contextlib.suppress(ImportError):  # Windows has none
            import readline  # noqa: F401 - lets ``input`` edit lines, and find earlier ones
        print(f"loading and compiling {args.target} ...", file=sys.stderr, flush=True)
    llm = jspec.load(args.target, args.draft, speculation=speculation, max_batch=1, **generate.loading(args))
    session = Session(llm, args.system, {"tools": tools, "chat_template": template}, sampling, args.plain)
    warm_up(llm, "jspec chat")
    session.greet(interactive)
    while True:
        try:
            if not session.turn(interactive):
                break
        except KeyboardInterrupt:
            if not interactive:
                raise
            session.interrupted = True  # only this, since a second Ctrl-C could interrupt more
    return 2 if session.refused and not interactive else 0


def read_tools(name: str) -> list[dict[str, Any]]:
    """The tools in a JSON file.

    Raises:
      ValueError: the file cannot be read, or is not a list of objects.
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
    """A conversation in the terminal.

    However a turn ends, ``messages`` has both sides of it or neither, since it changes in one assignment.

    Args:
      llm: the model.
      system: the system message, which ``/reset`` keeps; None for none.
      options: the tools and the template, for ``LLM.chat_prompt``.
      sampling: fields of ``SamplingParams``.
      plain: no colours.

    Attributes:
      messages: the turns so far.
      interrupted: whether Ctrl-C ended the last turn; the next turn handles it.
      refused: whether a turn was refused, because it was too long for example.

    Raises:
      ValueError: there is no chat template, or it refuses these messages.
    """

    def __init__(
        self, llm: "jspec.LLM", system: str | None, options: dict[str, Any], sampling: dict[str, Any], plain: bool
    ):
        self._llm, self._options, self._sampling, self._screen = llm, options, sampling, Screen(plain)
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, Any]] = list(self._first)
        self.interrupted = self.refused = False
        self._pending: list[dict[str, Any]] | None = None  # the messages whose response is under way
        self._format = ReplyFormat(llm, options["chat_template"], options["tools"])
        self._reply: Reply | None = None  # that response so far
        llm.chat_prompt([*self._first, {"role": "user", "content": "x"}], **options)

    def greet(self, interactive: bool):
        """Print the commands of the conversation, and what the colours mean."""
        if interactive:
            self._screen.note(HELP)
        if self._llm.method is not None:
            self._screen.legend()

    def turn(self, interactive: bool) -> bool:
        """Read a line and print the response to it; returns False at the end of the input."""
        self._finish_last_turn()
        line = self._line(interactive)
        if line is None or line.strip() == "/exit":
            return False
        if line.strip() == "/reset":
            self.messages = list(self._first)
            self._screen.note("the conversation is cleared")
        elif line.strip():
            try:
                self._respond(line)
            except ValueError as error:
                self._refuse(error)
        return True

    def _respond(self, text: str):
        messages = [*self.messages, {"role": "user", "content": text}]
        self._reply, self._pending = None, messages
        prompt, max_len = self._llm.chat_prompt(messages, **self._options), self._llm.engine.config.max_len
        if len(prompt) >= max_len:
            raise ValueError(
                f"the conversation has {len(prompt)} tokens, but max_len={max_len} leaves room for {max_len - 1} and one "
                "new token; /reset clears the conversation, and --max-len gives room for a longer one"
            )
        sampling = {**self._sampling}
        if self._format.tokens is not None:
            sampling["skip_special_tokens"] = False  # among which may be markers
        request, result = self._llm.engine.request(prompt, **sampling), None
        self._reply, start = Reply(self._format, prompt), time.perf_counter()
        with contextlib.closing(self._llm.engine.stream(request)) as deltas:
            for delta in deltas:
                for piece in self._reply.add(delta):
                    if piece.kind != "reasoning" or self._screen.is_terminal:
                        self._screen.write([piece.span], dimmed=piece.kind != "text")
                result = delta.result
        seconds = time.perf_counter() - start
        self._screen.end_text()
        assert result is not None
        if result.finish_reason == "error":
            raise ValueError(f"the response failed: {result.stop_reason}")
        self.messages = [*messages, self._reply.message]
        self._pending = None
        self._screen.note(summary(result, seconds))

    def _refuse(self, error: ValueError):
        self.refused, self._pending = True, None
        print(f"jspec chat: {error}; the last turn is left out", file=sys.stderr, flush=True)

    def _finish_last_turn(self):
        """Add a response that Ctrl-C stopped to the conversation as far as it was shown; drop a turn without any."""
        messages, reply, interrupted = self._pending, self._reply, self.interrupted
        shown = reply is not None and not reply.is_empty
        if messages is not None and reply is not None and shown:
            self.messages = [*messages, reply.message]
        self._pending, self.interrupted = None, False
        if messages is not None:
            self._screen.end_text()
            self._screen.note("the response ends here" if shown else "no response yet: the last turn is left out")
        elif interrupted:
            self._screen.end_prompt_line()

    def _line(self, interactive: bool) -> str | None:
        """The next line of standard input without its newline; None at the end."""
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
            self._screen.end_prompt_line()
        return line.rstrip("\r\n") if line else None
