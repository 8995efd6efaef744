"""llguidance's matchers: how jspec makes them, and a trial of the first tokens.

The server and the processes that try grammars before it (``jspec.grammar.worker``) make them here, so that what one admits
is what the other compiles. Only llguidance is imported, because such a process has nothing else.
"""

import itertools
from collections.abc import Sequence
from typing import Any

MAX_LEXER_STATES = 2**16  # 25 MB; a text that has to come is walked through at once, one state for each byte
NO_TEXT = ("NoExtension", "NoExtensionBias")  # of llguidance: nothing can come, and the text is not complete
TRIED_TOKENS = 16  # that may come first, each of which is tried
TRIED_FORCED = 64  # tokens that have to come, which are followed before that


def make_tokens(tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int]) -> Any:
    """llguidance's view of a tokenizer, which knows the bytes of every token.

    Args:
      tokenizer: JSON of the ``tokenizers`` library.
      vocab_size: how many tokens there are at least.
      eos_token_ids: the tokens that end a text.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids))


def make_matcher(tokens: Any, grammar: str) -> Any:
    """The matcher of a grammar, at the beginning of a text.

    Raises:
      ValueError: llguidance refuses the grammar.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False, max_lexer_states=MAX_LEXER_STATES)
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
    require_sound(matcher)
    return matcher


def require_sound(matcher: Any):
    """Raise a ValueError with what llguidance says, if the matcher is in an error state."""
    if matcher.is_error():
        raise ValueError(error_of(matcher))


def error_of(matcher: Any) -> str:
    """What llguidance says about its matcher, in one line."""
    said = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    return "no text fits it" if said in NO_TEXT else said


def prepare(matcher: Any):
    """Find what may come first and what has to, which copies of the matcher then know.

    Raises:
      ValueError: no text can begin, or finding it exceeds llguidance's limits.
    """
    matcher.compute_bitmask()
    matcher.compute_ff_bytes()
    require_sound(matcher)


def try_first_tokens(matcher: Any):
    """Follow tokens that have to come, and then try some of those that may, each for one token.

    Grammars with thousands of alternatives compile, and exceed llguidance's limits with the first token.

    Raises:
      ValueError: one of these tokens cannot be followed.
    """
    prepare(matcher)
    for token in matcher.compute_ff_tokens()[:TRIED_FORCED]:
        matcher.consume_token(token)
        require_sound(matcher)
    if matcher.is_stopped():
        return
    allowed = _set_bits(matcher.compute_bitmask())
    require_sound(matcher)
    step = max(len(allowed) // TRIED_TOKENS, 1)
    for token in allowed[::step]:
        tried = matcher.deep_copy()
        tried.consume_token(token)
        require_sound(tried)
        if not tried.is_stopped():
            tried.compute_bitmask()
            require_sound(tried)


def _set_bits(mask: bytes) -> list[int]:
    bits = itertools.chain.from_iterable(((byte >> i) & 1 for i in range(8)) for byte in mask)
    return [place for place, bit in enumerate(bits) if bit]
