"""Makes the fields of ``generation_config.json`` from the metadata of a GGUF file: end tokens and sampling defaults."""

from typing import Any

import numpy as np

from jspec._validation import is_number
from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.gguf.header import Header
from jspec.checkpoints.gguf.vocabulary import CONTROL, USER_DEFINED, Vocabulary, read_vocabulary

# Converters store one end token, where the original often names several. So llama.cpp knows these by their text
# (``src/llama-vocab.cpp``), and those of infilling, which no original names.
_END_TEXTS = """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT>
    _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[
"""
_ENDS = frozenset(_END_TEXTS.split())
_HARMONY = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})  # with these, <|end|> ends a message, and no text
_TAG = "</s>"  # ends a text where it is a control token; in Gemma it is a tag of HTML
_TEMPLATES = ("tokenizer.chat_template", "tokenizer.chat_templates")
_SAMPLING = {  # field of generation_config.json -> key
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def generation_fields(header: Header) -> tuple[dict[str, Any], str]:
    """What ``generation_config.json`` of the original checkpoint says, as far as the file has it.

    Args:
      header: that of the file.

    Returns:
      The fields; and one sentence for the user, which says what was made up and what is missing. It is empty if neither is
      the case.

    Raises:
      Refusal: a token id or a sampling default is no number that it can be.

    Example::

        fields, sentence = generation_fields(read_header("model.gguf"))
        print(fields["eos_token_id"], sentence)
    """
    metadata = Fields(header.metadata, header.where)
    vocabulary = read_vocabulary(metadata)
    fields: dict[str, Any] = {}
    lacks = []
    if vocabulary is not None:
        tokens, ids = vocabulary.tokens, vocabulary.ids
        fields = {f"{name}_token_id": ids[name] for name in ("bos", "pad") if name in ids}
        stored = {tokens[ids[name]]: ids[name] for name in ("eos", "eot", "eom") if name in ids}
        known = _ends_of_chats(vocabulary) if any(key in metadata.raw for key in _TEMPLATES) else {}
        if stored | known:
            fields["eos_token_id"] = list((stored | known).values())
        if unsaid := [text for text in known if text not in stored]:
            lacks.append(f"the end tokens {', '.join(unsaid)}, which are taken by their text as in llama.cpp,")
    sampling = {field: _short_number(metadata, key) for field, key in _SAMPLING.items() if key in metadata.raw}
    if sampling:
        fields |= {"do_sample": sampling.get("temperature", 1.0) > 0, **sampling}
    else:
        lacks.append("the original's sampling defaults; give temperature, top_k and top_p if it has some")
    return fields, f"{header.where} lacks {' and '.join(lacks).rstrip(',')}." if lacks else ""


def _ends_of_chats(vocabulary: Vocabulary) -> dict[str, int]:
    """The end tokens that are known by their text, with their ids. In a base model they may stand in any text."""
    types = vocabulary.types
    added = np.flatnonzero(np.isin(types, (CONTROL, USER_DEFINED))).tolist()
    ends = {text: i for i in added if (text := vocabulary.tokens[i]) in _ENDS and (text != _TAG or types[i] == CONTROL)}
    if any(texts <= ends.keys() for texts in _HARMONY):
        ends.pop("<|end|>", None)
    return ends


def _short_number(metadata: Fields, key: str) -> float | int:
    """A number as the original has it: 0.6, and not the 0.60000002384 that its 32 bits are."""
    value = metadata.raw[key]
    if not is_number(value):
        raise metadata.refuse(key, "a number")
    return value if isinstance(value, int) else float(str(np.float32(value)))
