"""System and developer messages in the form that a chat template writes, so that none of them vanishes.

Templates differ: some know ``developer``, many only ``system``; some write a system message anywhere, many only the first
message, and ignore or refuse others. Agents send all of it: a ``developer`` message and another one behind it, or a system
message in the middle of a conversation. What a template writes is found out by letting it render small conversations.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jspec.text.deadline import TooSlow

INSTRUCTIONS = ("system", "developer")  # roles whose messages instruct the model
LEADING = 3  # so many messages at the beginning of a conversation are told apart
MARK = "7f3a9c{};"  # the content of an instruction in a small conversation

Message = dict[str, Any]


def written_instructions(
    messages: Sequence[Message], where: str, renders: Callable[[Sequence[Message]], str]
) -> list[Message]:
    """The messages, so that the template writes every instruction among them: as they are if it does so already, else with
    ``system`` in place of ``developer``, else with all instructions in the first of them, as one message.

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
    missing = _missing(messages, renders)
    if missing == []:
        return list(messages)
    for form in (_as_system, _merged, lambda given: _merged(_as_system(given))):
        if _missing(form(messages), renders) == []:
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
    return [instructions[0] | {"content": "\n\n".join(message["content"] for message in instructions)}, *others]


def _outline(messages: Sequence[Message]) -> list[str]:
    """The roles of a small conversation with instructions at the same kinds of places: among the first messages, and later
    ones once for each role."""
    roles = [message["role"] for message in messages]
    leading = next((i for i, role in enumerate(roles) if role not in INSTRUCTIONS), len(roles))
    later = [role for role in dict.fromkeys(roles[leading:]) if role in INSTRUCTIONS]
    between = [role for instruction in later for role in (instruction, "assistant", "user")]
    return [*roles[: min(leading, LEADING)], "user", *between]


def _missing(messages: Sequence[Message], renders: Callable[[Sequence[Message]], str]) -> list[str] | None:
    """The roles of the instructions that the template does not write, or not in their order; None if it fails."""
    roles = _outline(messages)
    try:
        text = renders([{"role": role, "content": MARK.format(i)} for i, role in enumerate(roles)])
    except TooSlow:
        raise
    except Exception:  # of many kinds
        return None
    missing, last = [], -1
    for i, role in enumerate(roles):
        if role in INSTRUCTIONS:
            place = text.find(MARK.format(i))
            missing += [role] if place <= last else []
            last = max(place, last)
    return missing
