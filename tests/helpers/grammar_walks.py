"""Random texts of a grammar, token by token, over a tokenizer of bytes and markers."""

import functools
import json

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jspec.sampling.structured import StructuredOutputsParams
from jspec.text.grammar.constraint import GrammarConstraint
from jspec.text.grammar.matcher import make_matcher, make_tokens
from jspec.text.grammar.source import grammar_text
from jspec.text.parsers.registry import REASONING_FORMATS, TOOL_FORMATS

ENDING = frozenset('<>}]")/ \n,:')  # what a text that comes to its end consists of
LETTERS = frozenset("abcxy 0123.-_TfnCFulrLe")
MOST = 4000


@functools.cache
def tokenizer(has_tokens):
    """A tokenizer of bytes, in which all markers are tokens, or only the token that ends a text is."""
    from transformers import PreTrainedTokenizerFast

    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    fast = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast.add_special_tokens([AddedToken("<eos>", special=True)])
    if has_tokens:
        calls = [marker for form in TOOL_FORMATS.values() for marker in form.markers]
        thoughts = [marker for form in REASONING_FORMATS.values() for marker in form.markers or (form.start, form.end)]
        for marker in dict.fromkeys(calls + thoughts):
            if not marker.endswith("="):  # no tokenizer has such a token
                fast.add_tokens([AddedToken(marker, special=marker.startswith("["))])
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<eos>")


@functools.cache
def _tokens(has_tokens):
    known = tokenizer(has_tokens)
    return make_tokens(known.backend_tokenizer.to_str(), len(known), [known.eos_token_id])


@functools.cache
def _marked(has_tokens, letters: frozenset[str]) -> np.ndarray:
    """Which tokens are markers, or texts out of these letters: bool ``[V]``."""
    known = tokenizer(has_tokens)
    return np.array([token >= 256 or known.decode([token]) in letters for token in range(len(known))])


class Walks:
    """Random texts of one form.

    Args:
      form: of the texts.
      has_tokens: whether markers are tokens.
    """

    def __init__(self, form: StructuredOutputsParams, has_tokens: bool):
        self._has_tokens = has_tokens
        grammar = grammar_text(form)
        self._matcher = make_matcher(_tokens(has_tokens), grammar)
        markers = {marker for calls in TOOL_FORMATS.values() for marker in calls.markers}
        written = json.dumps(form.grammar or "")
        known = tokenizer(has_tokens)
        # Where they are no tokens, a text has to spell one to come to its end.
        self._spelled = [
            known.encode(text) for text in sorted(markers) if json.dumps(json.dumps(text))[3:-3] in written
        ]

    def walk(self, seed: int, wild: float = 0.05, first: str = "") -> list[int]:
        """The tokens of a text, which tends to its end the more, the longer it is.

        Args:
          wild: how often any token that may come is taken.
          first: its beginning.
        """
        known, random = tokenizer(self._has_tokens), np.random.default_rng(seed)
        of_ends, of_letters = (_marked(self._has_tokens, letters) for letters in (ENDING, LETTERS))
        end, size, newline = known.eos_token_id, len(known), known.encode("\n")[0]
        constraint = GrammarConstraint(self._matcher.deep_copy(), _tokens(self._has_tokens), size, [end])
        tokens, spelled = known.encode(first), list[int]()
        constraint.add(tokens)
        flags = np.zeros((1, (size + 31) // 32), np.uint32)
        while len(tokens) < MOST:
            flags[:] = 0xFFFFFFFF
            constraint.allow([], flags)
            may = np.unpackbits(flags.view(np.uint8), bitorder="little")[:size]
            allowed = np.flatnonzero(may)
            assert allowed.size
            closes = random.random() < min(0.3 + len(tokens) / 600, 0.97)
            kinds = [] if random.random() < wild else [of_ends, of_letters] if closes else [of_letters]
            likely = next((some for kind in kinds if (some := allowed[kind[allowed]]).size), allowed)
            if may[end] and closes:
                likely = [end]
            token = int(random.choice(likely))
            in_json = not may[newline]  # whose strings are not looked through for markers
            if not spelled and self._spelled and closes and not in_json and random.random() < 0.3:
                spelled = list(self._spelled[random.integers(len(self._spelled))])
            if spelled:
                token, *spelled = spelled if may[spelled[0]] else [token]
            if token == end:
                return tokens
            tokens.append(token)
            if constraint.add([token]) is not None:
                return tokens
        raise AssertionError(f"no end within {MOST} tokens: {known.decode(tokens)[:300]}")


def takes(form: StructuredOutputsParams, has_tokens: bool, text: str) -> bool:
    """Whether a text is complete under a form."""
    matcher = make_matcher(_tokens(has_tokens), grammar_text(form))
    return matcher.consume_tokens(tokenizer(has_tokens).encode(text)) and matcher.is_accepting()
