"""A chat model in a moment: a tokenizer of bytes with a chat template, and a table that says the same to everybody."""

import dataclasses
import functools
from pathlib import Path

import numpy as np
from engines import CONFIG, bigram, drafting, shared
from resaved import set_keys
from tiny import tiny_tokenizer

from jspec.checkpoints.tokenizer import load_tokenizer
from jspec.config import Speculation
from jspec.llm import LLM

BOS, EOS, VOCABULARY, MAX_LEN = 0, 1, 258, 128
ANSWER = "hé€\tok!"  # in which no byte comes twice
TEMPLATE = """\
{{- bos_token }}
{%- if tools %}{tools:{{ tools | tojson }}}{% endif %}
{%- if documents %}{docs:{{ documents | tojson }}}{% endif %}
{%- if mood is defined %}{mood:{{ mood }}}{% endif %}
{%- for message in messages %}
  {%- if message.role == 'pirate' %}{{ raise_exception('No pirates here!') }}{% endif %}
  {%- set who = message.name or message.tool_call_id or message.role %}
  {{- '[' + who + ':' + (message.content or '') }}
  {%- if message.tool_calls is defined %}{{ message.tool_calls | tojson }}{% endif %}
  {{- ']' }}
{%- endfor %}
{%- if add_generation_prompt %}>{% endif %}"""


def chat_tokenizer(folder: Path, chat_template=TEMPLATE):
    """What ``jspec.load`` makes of a folder with a byte-level tokenizer and this template; None leaves it without one."""
    folder.mkdir(exist_ok=True)
    tiny_tokenizer(folder)
    set_keys(folder / "tokenizer_config.json", chat_template=chat_template)
    return load_tokenizer(folder)


@functools.cache
def _answers(tokenizer, wrong: tuple[int, ...]) -> np.ndarray:
    """Logits ``[V, V]`` of ``ANSWER`` behind ">"; the end behind anything else, and behind the bytes of ``wrong``."""
    said = tokenizer.encode(f">{ANSWER}", add_special_tokens=False)
    following = np.full(VOCABULARY, EOS)
    for i, (token, after) in enumerate(zip(said, [*said[1:], EOS], strict=True)):
        following[token] = EOS if i in wrong else after
    return 40.0 * np.eye(VOCABULARY, dtype=np.float32)[following]


@shared
def chat_llm(tokenizer, drafts: bool = True, max_len: int = MAX_LEN) -> LLM:
    """A model that answers ``ANSWER`` to everybody. Its draft model fails after the third and the eighth byte."""
    target = bigram(_answers(tokenizer, ()), (EOS,), max_len)
    draft = bigram(_answers(tokenizer, (3, 8)), (EOS,), max_len) if drafts else None
    settings, method = Speculation(num_draft_tokens=3), "draft_model" if drafts else None
    config = dataclasses.replace(CONFIG, max_len=max_len)
    return LLM(target, draft, drafting(method, settings, VOCABULARY), method, tokenizer, settings, config)
