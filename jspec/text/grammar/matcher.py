"""llguidance's matchers: how jspec makes them, and a trial of the first tokens.

The server and the processes that try grammars before it (``jspec.text.grammar.worker``) make them here, so that what
one admits is what the other compiles. Only llguidance is imported, because such a process has nothing else.
"""

from collections.abc import Sequence
from typing import Any

MAX_LEXER_STATES = 2**16  # 25 MB; a text that has to come is walked through at once, one state for each byte
LONG = 256  # bytes that have to come; of more, only so many are made tokens at a time
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


def forced_tokens(tokens: Any, matcher: Any, before: Sequence[int]) -> Sequence[int]:
    """The tokens of the text that has to come next; of a long one, those of its beginning.

    They are what llguidance finds, with two differences. It makes tokens of all of the text whenever it is asked, 60,000
    characters for example. How the tokenizer splits the beginning does not depend on what is far behind it; so only
    ``LONG`` bytes are split, and the second half of their tokens is left out. And where the text spells a special token,
    llguidance gives that token, which stands for no text and cannot come.

    Args:
      tokens: llguidance's view of the tokenizer.
      matcher: llguidance's.
      before: the newest token of the text, if there is one.
    """
    if not tokens.is_canonical:  # then llguidance forces no tokens
        return ()
    text = matcher.compute_ff_bytes()
    if not text:
        return ()
    if len(text) <= LONG:
        found = matcher.compute_ff_tokens()
    else:
        found, _ = tokens.tokenize_partial(text[:LONG], before[-1:])
        found = found[: len(found) // 2]
    special = next((i for i, token in enumerate(found) if tokens.is_special_token(token)), len(found))
    if special == 0 and found:
        return tokens.greedy_tokenize(text[:LONG].decode(errors="ignore"))[:1]
    return found[:special]


def try_first_tokens(tokens: Any, matcher: Any):
    """Follow tokens that have to come, and then try some of those that may, each for one token.

    Grammars with thousands of alternatives compile, and exceed llguidance's limits with the first token.

    Args:
      tokens: llguidance's view of the tokenizer.
      matcher: llguidance's, at the beginning.

    Raises:
      ValueError: one of these tokens cannot be followed.
    """
    prepare(matcher)
    written: list[int] = []
    while len(written) < TRIED_FORCED and (forced := forced_tokens(tokens, matcher, written)):
        for token in forced:
            matcher.consume_token(token)
            require_sound(matcher)
        written += forced
    if matcher.is_stopped() or len(written) >= TRIED_FORCED:
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
    return [8 * place + i for place, byte in enumerate(mask) if byte for i in range(8) if byte >> i & 1]
