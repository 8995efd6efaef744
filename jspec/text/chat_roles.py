"""System and developer messages in the form that a chat template writes, so that none of them vanishes.

Templates differ: some know ``developer``, many only ``system``; some write a system message anywhere, many only the first
message, and ignore others, refuse them or move them to the head. Agents send all of it: a ``developer`` message and another
one behind it, or a system message in the middle or at the end of a conversation. What a template writes is found out by
letting it render small conversations.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from jspec.text.deadline import TooSlow

INSTRUCTIONS = ("system", "developer")  # roles whose messages instruct the model
LEADING = 3  # so many messages at the beginning of a conversation are told apart
MARK, MARKS = "7f3a9c{};", re.compile(r"7f3a9c\d+;")  # the content of a message of a small conversation
# An instruction in a user's message, as Claude Code marks its reminders there.
AS_USERS = "<system-reminder>\n{}\n</system-reminder>"
CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}  # the id is one of Mistral's

Message = dict[str, Any]


def written_instructions(
    messages: Sequence[Message], where: str, renders: Callable[[Sequence[Message]], str]
) -> list[Message]:
    """The messages, so that the template writes every instruction among them, and at its place.

    They are as they are if it does so already. If not, ``system`` takes the place of ``developer``, or those before the
    user's first message are one message, and later ones are the user's where they stand: the prompt of a conversation then
    begins with the one before, which the prefix cache has. Only where that fails too are all of them one message at the
    beginning.

    Args:
      messages: a conversation, of ``plain_messages``.
      where: its name in error messages.
      renders: the template's text of a conversation. It may raise anything.

    Raises:
      ValueError: the template leaves instructions out in every form.
      TooSlow: it does not end.
    """
    if all(message["role"] not in INSTRUCTIONS for message in messages):
        return list(messages)
    small = _small(messages)
    missing = _missing(small, list, renders)
    if missing == []:
        return list(messages)
    placed, merged = (lambda given: _in_place(_as_system(given))), (lambda given: _merged(_as_system(given)))
    for form in (_as_system, _in_place, placed, _merged, merged):
        if _missing(small, form, renders) == []:
            return form(messages)
    if missing is None:  # the template refuses them, and says why when it gets the whole conversation
        return list(messages)
    index = next(i for i, message in enumerate(messages) if message["role"] == missing[0])
    raise ValueError(
        f"{where}[{index}].role={missing[0]!r}: the chat template writes no such message; expected its content in a message "
        "of the user, or another chat_template"
    )


def _as_system(messages: Sequence[Message]) -> list[Message]:
    return [message | {"role": "system"} if message["role"] == "developer" else message for message in messages]


def _merged(messages: Sequence[Message]) -> list[Message]:
    """All instructions as one message at the beginning, whose role is that of the first of them."""
    instructions = [message for message in messages if message["role"] in INSTRUCTIONS]
    others = [message for message in messages if message["role"] not in INSTRUCTIONS]
    merged = "\n\n".join(message["content"] for message in instructions)
    return [*([instructions[0] | {"content": merged}] if instructions else []), *others]


def _in_place(messages: Sequence[Message]) -> list[Message]:
    """The instructions before the first message of the user as one message, and later ones as the user's where they stand.

    A later one is text at the end of the user's message or the tool's result before it, or at the start of the user's
    message behind it, so that roles alternate as before, and templates that leave out reasoning before the user's last
    message do not leave out more. Between two messages of the model it is one of its own. Calls stay beside their results.
    """
    first = _leading(messages)
    placed, waiting = _merged(messages[:first]), list[str]()
    for message in [*messages[first:], {"role": ""}]:
        if message["role"] in INSTRUCTIONS:
            waiting.append(AS_USERS.format(message["content"]))
            continue
        if waiting and message["role"] != "tool":
            if placed[-1]["role"] in ("user", "tool"):
                placed[-1] = placed[-1] | {"content": "\n\n".join([placed[-1]["content"], *waiting])}
            elif message["role"] == "user":
                message = message | {"content": "\n\n".join([*waiting, message["content"]])}
            else:
                placed.append({"role": "user", "content": "\n\n".join(waiting)})
            waiting = []
        placed.append(message)
    return placed[:-1]


def _leading(messages: Sequence[Message]) -> int:
    """How many messages come before the first of the user; all if there is none of the user."""
    return next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages))


def _small(messages: Sequence[Message]) -> list[Message]:
    """A small conversation with instructions among the first messages, one at least, and, where this one has later ones, at
    all kinds of places to which it may come: so its form stays the same while it goes on."""
    roles, first = [message["role"] for message in messages], _leading(messages)
    outline = roles[: min(first, LEADING)]
    if set(outline).isdisjoint(INSTRUCTIONS):  # a template that writes none anywhere is to be found out
        outline = [next(role for role in roles if role in INSTRUCTIONS), *outline]
    for role in INSTRUCTIONS:
        if role in roles[first:]:
            outline += ["user", role, "assistant", role, "user", "assistant"]
            outline += ["user", "calls", role, "tool", role, "assistant"] if "tool" in roles else []
    small = [{"role": role, "content": MARK.format(i)} for i, role in enumerate([*outline, "user"])]
    result = {"tool_call_id": CALL["id"], "name": CALL["function"]["name"]}
    calls = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    return [calls if m["role"] == "calls" else m | result if m["role"] == "tool" else m for m in small]


def _missing(
    small: Sequence[Message], form: Callable[[Sequence[Message]], list[Message]], renders: Callable
) -> list[str] | None:
    """The roles of a small conversation's instructions that the template does not write, or not behind what stands before
    them in this form; None if it fails."""
    roles = {message["content"]: message["role"] for message in small if message["role"] in INSTRUCTIONS}
    messages = form(small)
    try:
        text = f"\n{renders(messages)}"  # so that no mark is at 0, where the empty text is found
    except TooSlow:
        raise
    except Exception:  # of many kinds
        return None
    marks = MARKS.findall("".join(message["content"] for message in messages))
    pairs = zip(["", *marks], marks, strict=False)
    return [roles[mark] for before, mark in pairs if mark in roles and text.find(mark) <= text.find(before)]
