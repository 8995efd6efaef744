"""A byte-level tokenizer in which the markers of all formats that are tokens of public models are tokens."""

import functools
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jspec.text.parsers.lexer import MarkerTokens

ORDINARY = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>")
ORDINARY += ("</arg_value>", "<seed:tool_call>", "</seed:tool_call>", "<minimax:tool_call>", "</minimax:tool_call>")
SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<|python_tag|>", "<|im_end|>", "｜DSML｜")
SPECIAL += tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end"))
SPECIAL += tuple(f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "return", "call"))
SPECIAL += tuple(f"<|tool_calls_section_{name}|>" for name in ("begin", "end"))
SPECIAL += tuple(f"<|tool_call_{name}|>" for name in ("begin", "argument_begin", "end"))
SPECIAL += ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|python_start|>", "<|python_end|>")
SINGLE = (*ORDINARY, *SPECIAL)


class MarkerTokenizer:
    """The part of a tokenizer of transformers that parsers use."""

    def __init__(self):
        bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
        self.fast = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(bytes_)}, merges=[]))
        self.fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self.fast.decoder = decoders.ByteLevel()
        self.fast.add_tokens([AddedToken(text, special=False, normalized=False) for text in ORDINARY])
        self.fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
        self.added_tokens_decoder = self.fast.get_added_tokens_decoder()

    def encode(self, text: str) -> list[int]:
        return self.fast.encode(text, add_special_tokens=False).ids

    def encode_plain(self, text: str) -> list[int]:
        """The tokens of the text's bytes alone."""
        return [token for character in text for token in self.encode(character)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self.fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


@functools.cache
def marker_tokenizer() -> MarkerTokenizer:
    return MarkerTokenizer()


@functools.cache
def marker_tokens() -> MarkerTokens:
    return MarkerTokens.of(marker_tokenizer())
