"""The forms of prompts, one or many: text, token ids, or vLLM's dictionaries of either."""

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jspec._validation import is_int
from jspec.config import ModelConfig

LONGEST_PROMPT = 512  # tokens of a prompt in ``token_ids``
Prompt = str | Sequence[int] | Mapping[str, Any]

_FORMS = "text, token ids, {'prompt': text} or {'prompt_token_ids': ids}"


def as_list(prompts: Any, what: str = "prompts") -> tuple[list[Any], bool]:
    """The prompts in a list, and whether a single prompt was given: text, a flat sequence of ids, or a dictionary. ``what``
    they are, for messages.

    Raises:
      ValueError: ``prompts`` is neither a prompt nor an ordered collection of prompts.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts], True
    if isinstance(prompts, set | frozenset):
        raise ValueError(f"{what} is a set, which has no order for the results to follow; give a list")
    if isinstance(prompts, bytes | bytearray):
        raise ValueError(f"{what} is bytes; decode them first, as in {what}.decode('utf-8')")
    if hasattr(prompts, "ndim"):  # an array. Iterating over one on a device would fetch each number by itself
        prompts = np.asarray(prompts)
    if not isinstance(prompts, Iterable) or (isinstance(prompts, np.ndarray) and prompts.ndim == 0):
        raise ValueError(f"{what}={prompts!r}: expected {_FORMS}, or a list of such")
    listed = list(prompts)
    first = listed[0] if listed else ""  # a number, if these are the ids of one prompt
    if not isinstance(first, str) and (isinstance(first, numbers.Number) or getattr(first, "ndim", None) == 0):
        return [prompts if isinstance(prompts, np.ndarray) else listed], True
    return listed, False


def text_or_ids(index: int, prompt: Prompt) -> str | Sequence[int]:
    """The text or token ids of prompt ``index``, taken out of its dictionary if it is one.

    Raises:
      ValueError: the dictionary holds neither text nor ids, or other things too.
    """
    if not isinstance(prompt, Mapping):
        return prompt
    keys = list(map(str, prompt))
    if "role" in keys:
        raise ValueError(
            f"prompt {index} is a chat message: call llm.chat(messages), or give llm.chat_prompt(messages), the tokens of "
            "the conversation, as a prompt"
        )
    if "input_ids" in keys:
        raise ValueError(f"prompt {index} is what a tokenizer returns; give its ['input_ids'] alone")
    unknown = [key for key in keys if key not in ("prompt", "prompt_token_ids")]
    if unknown:
        raise ValueError(f"prompt {index} is a dictionary with {unknown[0]!r}: expected {_FORMS}")
    ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
    if ids is not None and not isinstance(ids, str | Mapping):
        return ids  # vLLM lets the text stand beside them
    if ids is None and isinstance(text, str):
        return text
    name, value = ("prompt", text) if ids is None else ("prompt_token_ids", ids)
    raise ValueError(f"prompt {index} is a dictionary with {name}={value!r}: expected {_FORMS}")


def flat_ids(token_ids: Any, what: str, expected: str = "") -> np.ndarray:
    """Token ids as an array ``[n]`` of integers. It holds Python integers if one of them does not fit in 64 bits.

    Args:
      token_ids: any flat sequence of integers, or an array.
      what: name of the prompt in error messages, ``prompt 3`` for example.
      expected: other accepted forms for the message, ``a string or `` for example.

    Raises:
      ValueError: ``token_ids`` is not a flat sequence of integers.
    """
    try:
        tokens = np.asarray(token_ids)
    except (ValueError, TypeError):  # lists of different lengths in a list
        tokens = np.asarray(None)
    integers = np.issubdtype(tokens.dtype, np.integer) or tokens.size == 0
    if tokens.ndim != 1 or not (integers or (tokens.dtype == object and all(map(is_int, tokens)))):
        raise ValueError(f"{what}: expected {expected}a flat list of integer token ids")
    return tokens


def checked_ids(token_ids: Any, vocab_size: int, what: str, expected: str = "") -> list[int]:
    """``flat_ids`` as a list of int.

    Raises:
      ValueError: as for ``flat_ids``, or an id is not in 0 .. vocab_size - 1.
    """
    tokens = flat_ids(token_ids, what, expected)
    for token in tokens[(tokens < 0) | (tokens >= vocab_size)][:1]:
        raise ValueError(f"{what} has token id {token}: expected 0..{vocab_size - 1}, the target's vocabulary")
    return tokens.astype(np.int64).tolist()


def token_ids(
    prompts: Sequence[Prompt], tokenizer, target: ModelConfig, chat: bool | None, longest: int = LONGEST_PROMPT
) -> list[list[int]]:
    """The token ids of prompts for a target, of a long one the last ``longest``. With ``chat``, or by default if the
    tokenizer has a chat template, each text becomes a user's message."""
    if not prompts:
        raise ValueError("prompts is empty: expected at least one")
    if tokenizer is None and any(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("the target has no tokenizer: expected prompts of token ids")
    if chat is None:
        chat = bool(getattr(tokenizer, "chat_template", None))
    longest, encoded = min(longest, target.max_position // 2), []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str) and chat and tokenizer is not None:
            message = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(
                message, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) and tokenizer is not None else list(prompt)
        ids = checked_ids(ids, target.vocab_size, f"prompt {number}")
        if not ids:
            raise ValueError("prompts has an empty one: expected at least one token each")
        encoded.append(ids[-longest:])
    return encoded
