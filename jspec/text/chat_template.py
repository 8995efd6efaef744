"""The tokens of a chat, by the chat template of the checkpoint or of the caller.

A template is a Jinja program, and that of a checkpoint is not trusted. transformers runs it in Jinja's sandbox, which
reaches neither files nor Python's internals, and it may use ``MAX_SECONDS`` of CPU time.
"""

import contextlib
import functools
import inspect
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jspec._validation import is_int, require
from jspec.text.chat_messages import plain_messages, short, with_argument_objects
from jspec.text.chat_parts import in_parts, needs_parts
from jspec.text.chat_roles import written_instructions
from jspec.text.deadline import TooSlow, limited
from jspec.text.detokenizer import COUNTED_CONTEXTS, TooLong, encode_within, kept_tokens

MAX_TEMPLATE = 2**20  # characters of a template; the longest that are known have some 20,000
MAX_REASON = 300  # characters of an error that a template caused
BEGUN = "7f3a9c"  # stands for the beginning of a message while a template writes what is before
MAX_SECONDS = 10.0  # of CPU time for a conversation; one of 8 MiB takes known templates less than one

OPTIONS = ("tools", "add_generation_prompt", "continue_final_message", "chat_template", "documents")


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a conversation, arguments of ``prompt_tokens``, among those of a call, and the others."""
    of_chat = {name: options[name] for name in OPTIONS if name in options}
    return of_chat, {name: value for name, value in options.items() if name not in OPTIONS}


def prompt_tokens(
    tokenizer: Any,
    max_len: int,
    messages: Any,
    *,
    where: str = "messages",
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | os.PathLike | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    truncate_prompt_tokens: int | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """The tokens of a conversation. ``LLM.chat_prompt`` explains the arguments.

    The tokenizer adds no beginning-of-text token to those that the template writes.

    Args:
      tokenizer: the target's, of transformers; None if its checkpoint has none.
      max_len: the longest text, in tokens.
      where: name of the conversation in error messages.

    Raises:
      ValueError: there is no template, it cannot be used with these messages, or an argument is of the wrong kind.
      TooLong: the text is several times longer than ``max_len`` tokens.
    """
    conversation, options = plain_messages(messages, where), dict(template_kwargs or {})
    require(isinstance(add_generation_prompt, bool), "add_generation_prompt", add_generation_prompt, "True or False")
    require(isinstance(continue_final_message, bool), "continue_final_message", continue_final_message, "True or False")
    kept = truncate_prompt_tokens
    ok = kept is None or (is_int(kept) and (kept == -1 or kept >= 1))
    require(ok, "truncate_prompt_tokens", kept, "None, an integer of at least 1, or -1")
    if continue_final_message and add_generation_prompt:
        raise ValueError(
            "continue_final_message=True goes on with the last message, and add_generation_prompt=True begins another: "
            "give add_generation_prompt=False beside it"
        )
    for name in options:
        allowed = name not in reserved_names()
        require(allowed, name, options[name], "only variables of the chat template, and this is none; leave it out")
    template = _template(tokenizer, chat_template, tools := _tools(tools))
    options |= {"tools": tools, "documents": _documents(documents)}
    options |= {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    renders = functools.partial(_text, tokenizer, template, options)
    small = functools.partial(
        _text, tokenizer, template, options | {"add_generation_prompt": False, "continue_final_message": False}
    )
    try:
        if needs_parts(template, small):
            renders, small = in_parts(renders), in_parts(small)
        if continue_final_message:
            renders = functools.partial(_continued, renders)
        text = _render(where, written_instructions(conversation, where, small), renders)
    except TooSlow as error:
        raise ValueError(f"{where}: the chat template {error}; expected another chat_template") from None
    most = COUNTED_CONTEXTS * max_len if kept is None else kept_tokens(kept, max_len)
    what = f"the text that the chat template made of {where}"
    tokens = encode_within(tokenizer, text, what, most, last=kept is not None, add_special_tokens=False)
    if tokens is None:
        raise TooLong(
            f"{where} make a prompt of {len(text)} characters, which max_len={max_len} tokens cannot hold; shorten them, "
            "or load the model with a larger max_len"
        )
    if not tokens:
        raise ValueError(f"{where}: the chat template makes an empty prompt of them; expected another chat_template")
    return tokens


def conversation_prompts(
    tokenizer: Any, max_len: int, messages: Any, chat_template_kwargs: Any, **options
) -> tuple[list[list[int]], bool]:
    """The tokens of one conversation, or of each of several, and whether it is one.

    Args:
      tokenizer, max_len: as for ``prompt_tokens``.
      messages: one conversation, or a list of conversations.
      chat_template_kwargs: variables of the template by name, or None.
      **options: further arguments of ``prompt_tokens``.

    Raises:
      ValueError: as ``prompt_tokens``, or the variables are no dictionary.
    """
    several = isinstance(messages, list | tuple) and len(messages) > 0
    single = not (several and all(isinstance(conversation, list | tuple) for conversation in messages))
    variables = {} if chat_template_kwargs is None else chat_template_kwargs
    ok = isinstance(variables, Mapping) and all(isinstance(name, str) for name in variables)
    require(ok, "chat_template_kwargs", variables, "a dictionary with the names and values of template variables")
    named = [("messages", messages)] if single else [(f"messages[{i}]", each) for i, each in enumerate(messages)]
    of_each = functools.partial(prompt_tokens, tokenizer, max_len, template_kwargs=variables, **options)
    return [of_each(conversation, where=where) for where, conversation in named], single


def _template(tokenizer: Any, given: str | os.PathLike | None, tools: list[dict[str, Any]] | None) -> str:
    """The text of the given template, or else of the checkpoint's."""
    if not callable(getattr(tokenizer, "apply_chat_template", None)):
        raise ValueError(
            "messages need a tokenizer of transformers, and the checkpoint has none; pass token ids to jspec.generate()"
        )
    own = getattr(tokenizer, "chat_template", None)
    if given is None and not own:
        raise ValueError(
            "chat_template=None, and the checkpoint has no chat template of its own: it is no chat model, or a file is "
            "missing; give chat_template=, a template's text or a pathlib.Path, or complete plain text with jspec.generate()"
        )
    if isinstance(given, os.PathLike):
        given = read_template(given)
    named = own if isinstance(own, dict) else {}
    ok = given is None or (isinstance(given, str) and (given in named or "{" in given))
    names = f", or one of {', '.join(map(repr, named))}" if named else ""
    if not ok:
        raise ValueError(
            f"chat_template={short(given)}: expected the text of a Jinja template{names}; to read it from a file, give "
            "pathlib.Path(...)"
        )
    try:
        template = tokenizer.get_chat_template(given, tools)
    except ValueError:  # several, and none of them is the default
        raise ValueError(f"chat_template=None: expected one of {', '.join(map(repr, named))}") from None
    if len(template) > MAX_TEMPLATE:
        raise ValueError(f"chat_template has {len(template)} characters: expected at most {MAX_TEMPLATE}")
    return template


def read_template(path: str | os.PathLike) -> str:
    """The text of a file that holds a template.

    Raises:
      ValueError: there is no such file, or it holds no template.
    """
    file = pathlib.Path(path)
    try:
        with file.open("rb") as opened:
            content = opened.read(4 * MAX_TEMPLATE + 1)
        text = content.decode("utf-8")
    except OSError as error:
        raise ValueError(
            f"chat_template={str(file)!r} cannot be read ({error.strerror}): expected a Jinja file"
        ) from None
    except UnicodeDecodeError:
        raise ValueError(f"chat_template={str(file)!r}: expected a Jinja file, text in UTF-8") from None
    require("{" in text and len(text) <= MAX_TEMPLATE, "chat_template", str(file), "a Jinja file of at most 1 MiB")
    return text


def _text(tokenizer: Any, template: str, options: dict[str, Any], conversation: Sequence[dict[str, Any]]) -> str:
    """The text of a conversation under a template; ``options`` are arguments of transformers and template variables."""
    render = functools.partial(
        tokenizer.apply_chat_template, list(conversation), chat_template=template, tokenize=False, **options
    )
    return limited(render, MAX_SECONDS)


def _continued(renders: Callable[[Sequence[dict[str, Any]]], str], conversation: Sequence[dict[str, Any]]) -> str:
    """The text of a conversation through its last message, with all that the caller has begun: templates leave out the
    reasoning of old messages, which transformers refuses here."""
    last = conversation[-1]
    try:
        return renders(conversation)
    except ValueError:
        if not last.get("content", "").strip():
            raise
    return renders([*conversation[:-1], last | {"content": BEGUN}]).removesuffix(BEGUN) + last["content"]


def _render(
    where: str, conversation: Sequence[dict[str, Any]], renders: Callable[[Sequence[dict[str, Any]]], str]
) -> str:
    """The text of a conversation.

    Raises:
      ValueError: the template cannot be parsed, refuses the conversation, or fails.
    """
    from jinja2 import TemplateError, TemplateSyntaxError  # imported here, because only chats need it

    try:
        return renders(conversation)
    except TemplateSyntaxError as error:
        raise ValueError(f"chat_template, line {error.lineno}: {_reason(error)}; correct the template") from None
    except (ImportError, TooSlow):  # jinja2 is too old for transformers, or the caller says it
        raise
    except Exception as error:
        with contextlib.suppress(Exception):
            if (objects := with_argument_objects(conversation)) is not None:
                return renders(objects)
        how = f"fails on them ({type(error).__name__}: {_reason(error)})"
        if type(error) is TemplateError:  # ``raise_exception``, which templates call for messages that they do not take
            how = f"refuses them: {_reason(error)}"
        raise ValueError(f"{where}: the chat template {how}; change them, or give another chat_template") from None


def _reason(error: BaseException) -> str:
    """The message of an error on one line without control characters."""
    text = " ".join(str(error).split()).rstrip(".!")
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= MAX_REASON else f"{text[: MAX_REASON - 4]} ..."


def _tools(given: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """The tools as JSON schemas; None if there are none."""
    if given is None:
        return None
    require(isinstance(given, list | tuple), "tools", given, "a list of tools, JSON schemas or Python functions")
    return [_tool(f"tools[{index}]", tool) for index, tool in enumerate(given)] or None


def _tool(where: str, tool: Any) -> dict[str, Any]:
    expected = (
        "expected {'type': 'function', 'function': {'name': ..., 'parameters': ...}}, or a Python function with type hints "
        "and a docstring"
    )
    if isinstance(tool, Mapping):
        return _checked_tool(where, tool)
    if not inspect.isroutine(tool):
        raise ValueError(f"{where}={short(tool)}: {expected}")
    from transformers.utils.chat_template_utils import get_json_schema  # imported here, because it takes seconds

    try:
        return get_json_schema(tool)
    except Exception as error:  # it parses the docstring, which may be anything
        raise ValueError(f"{where}={short(tool)} has no JSON schema ({_reason(error)}): {expected}") from None


def _checked_tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's dictionary of a tool, or only its function's."""
    kind, function = tool.get("type", "function"), tool.get("function", tool)
    if kind != "function":
        raise ValueError(f"{where}.type={short(kind)}: expected 'function'; a chat template describes functions alone")
    place = f"{where}.function" if function is not tool else where
    if not isinstance(function, Mapping):
        raise ValueError(f"{place}={short(function)}: expected an object with 'name' and 'parameters'")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(f"{place}.name={short(function.get('name'))}: expected the name of a function")
    parameters = function.get("parameters")
    if not (parameters is None or isinstance(parameters, Mapping)):
        raise ValueError(f"{place}.parameters={short(parameters)}: expected a JSON schema, which is an object")
    return dict(tool)


def _documents(given: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if given is None:
        return None
    require(isinstance(given, list | tuple), "documents", given, "a list of {'title': ..., 'text': ...}")
    for index, document in enumerate(given):
        if not isinstance(document, Mapping):
            raise ValueError(f"documents[{index}]={short(document)}: expected {{'title': ..., 'text': ...}}")
    return [dict(document) for document in given] or None


@functools.cache
def reserved_names() -> frozenset[str]:
    """Names that are no template variables: arguments of transformers, and variables that jspec sets."""
    from transformers import PreTrainedTokenizerBase  # imported here, because it takes seconds

    names = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset({*names, "self", "messages", "conversations", "chat"})
