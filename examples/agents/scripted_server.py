"""``jspec serve`` with a target whose texts are given, for clients of agents where no model that knows tools is at hand.

    python examples/agents/scripted_server.py SCRIPT TARGET [options of jspec serve]

SCRIPT is a JSON file with a list of texts. The target writes text number k where the conversation has k results of tools,
and the last one where it has more. A grammar with one text makes it do so; drafts, verification, parsers and endpoints are
those of every server. Requests with a form of their own, such as forced calls, keep it.
"""

import dataclasses
import functools
import json
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from jspec import cli
from jspec.sampling.structured import StructuredOutputsParams
from jspec.sampling.thinking import ThinkingBudget
from jspec.serving.generation.service import Service
from jspec.serving.server import served_model

RESULT = "# result of a tool: "  # what the template writes before each
TEMPLATE = (
    "{% if tools %}# tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}" + RESULT + "{{ message.content }}\n"
    "{% else %}# {{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}# assistant: {% endif %}"
)
OPTIONS = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")


class ScriptedService(Service):
    """A service whose target writes texts of ``SCRIPT``."""

    @functools.cached_property
    def script(self) -> list[str]:
        """The texts."""
        return json.loads(pathlib.Path(sys.argv[1]).read_text())

    def requests(self, prompt: Sequence[int], params: Sequence[Any], *args, **kwargs):
        number = self.decoded(prompt).count(RESULT)
        form = StructuredOutputsParams(choice=[self.script[min(number, len(self.script) - 1)]])
        # A target that knows no tools would not end its reasoning where a call is forced.
        forced, free = {"thinking_budget": ThinkingBudget(5)}, {"structured_outputs": form}
        own = [dataclasses.replace(p, **(forced if p.structured_outputs else free)) for p in params]
        return super().requests(prompt, own, *args, **kwargs)


def call(name: str, thought: str = "", **arguments: Any) -> str:
    """The text of a call, as a model with these parsers writes it."""
    called = json.dumps({"name": name, "arguments": arguments})
    return f"<think>\n{thought or 'I call a tool.'}\n</think>\n\n<tool_call>\n{called}\n</tool_call>"


def answer(text: str) -> str:
    """The text of an answer."""
    return f"<think>\nI know.\n</think>\n\n{text}"


if __name__ == "__main__":
    served_model.Service = ScriptedService
    with tempfile.TemporaryDirectory() as folder:
        template = pathlib.Path(folder, "chat.jinja")
        template.write_text(TEMPLATE)
        sys.exit(cli.main(["serve", *sys.argv[2:], *OPTIONS, "--chat-template", str(template)]))
