"""``jspec serve`` with a model whose text is given: it calls a tool, and answers when it has the result.

    python tests/helpers/scripted_server.py serve TARGET --draft DRAFT ..

The shipped models know no tools. So a grammar with one text makes the target write what a model that knows them would:
reasoning and a call where the conversation has no result yet, and an answer behind it. Drafts, verification, parsers and
endpoints are those of every server. Requests that have a form of their own, such as forced calls, keep it.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from jspec import cli
from jspec.sampling.structured import StructuredOutputsParams
from jspec.sampling.thinking import ThinkingBudget
from jspec.serving.openai import served_model
from jspec.serving.openai.service import Service

TEMPLATE = (
    "{% for message in messages %}# {{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant: {% endif %}"
)
THOUGHT, PATH, RESULT, ANSWER = "I look.", "a.py", "x = 41", "The number is 41."
CALLED = f'{{"name": "read_file", "arguments": {{"path": "{PATH}"}}}}'
CALL = f"<think>\n{THOUGHT}\n</think>\n\n<tool_call>\n{CALLED}\n</tool_call>"

ANSWERED = f"<think>\nI know.\n</think>\n\n{ANSWER}"


class ScriptedService(Service):
    """A service whose model writes ``CALL``, and ``ANSWERED`` where the prompt has the result of a tool."""

    def requests(self, prompt: Sequence[int], params: Sequence[Any], *args, **kwargs):
        text = ANSWERED if "# tool: " in self.decoded(prompt) else CALL
        form = StructuredOutputsParams(choice=[text])
        forced = {"thinking_budget": ThinkingBudget(5)}  # the shipped target would not end its reasoning
        fields = [forced if p.structured_outputs else {"structured_outputs": form} for p in params]
        own = [dataclasses.replace(p, **given) for p, given in zip(params, fields, strict=True)]
        return super().requests(prompt, own, *args, **kwargs)


if __name__ == "__main__":
    served_model.Service = ScriptedService
    sys.exit(cli.main(sys.argv[1:]))
