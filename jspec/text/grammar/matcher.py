"""llguidance's matchers: their construction, jump-forward tokens, and a trial of the first tokens.

Both the server and the processes that try grammars (``jspec.text.grammar.worker``) use this module, so that they accept
the same grammars. It imports only llguidance.
"""

from collections.abc import Sequence
from typing import Any

MAX_LEXER_STATES = 2**16  # 25 MB; jump-forward text takes one state for each byte
SPECIAL = b"\xff["  # begins a token in llguidance's text that a grammar asks for by its id; ``]`` ends it
LONG = 256  # bytes of jump-forward text that are tokenised at a time
NO_TEXT = ("NoExtension", "NoExtensionBias")  # llguidance's errors if nothing can follow an incomplete text
TRIED_TOKENS = 16  # allowed first tokens that are tried
TRIED_FORCED = 64  # jump-forward tokens that are followed before


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
    """llguidance's error message on one line."""
    message = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    return "no text fits it" if message in NO_TEXT else message


def prepare(matcher: Any):
    """Compute the allowed first tokens and the jump-forward text, which copies of the matcher then have.

    Raises:
      ValueError: no text can begin, or finding it exceeds llguidance's limits.
    """
    matcher.compute_bitmask()
    matcher.compute_ff_bytes()
    require_sound(matcher)


def forced_tokens(tokens: Any, matcher: Any, before: Sequence[int]) -> Sequence[int]:
    """The jump-forward tokens; of a long jump-forward text, those of its beginning.

    They are llguidance's, with two differences. llguidance tokenises the complete text at each call, 60,000 characters
    for example. The split of the beginning does not depend on text far behind it; so only ``LONG`` bytes are tokenised,
    and the second half of their tokens is left out. And where the text spells a special token, llguidance gives that
    token, which the grammar does not allow.

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
    if text.startswith(SPECIAL):  # the grammar asks for this token, by its id
        return [int(text[len(SPECIAL) : text.index(b"]")])]
    if len(text) <= LONG:
        forced = matcher.compute_ff_tokens()
    else:
        plain = text[:LONG].partition(SPECIAL)[0]
        forced, _ = tokens.tokenize_partial(plain, before[-1:])
        if len(plain) == LONG:
            forced = forced[: len(forced) // 2]
    special = next((i for i, token in enumerate(forced) if tokens.is_special_token(token)), len(forced))
    if special == 0 and forced:
        return tokens.greedy_tokenize(text[:LONG].decode(errors="ignore"))[:1]
    return forced[:special]


def try_first_tokens(tokens: Any, matcher: Any):
    """Follow jump-forward tokens, and then try some of the allowed tokens, each for one step.

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
    mask = matcher.compute_bitmask()
    allowed = [8 * place + i for place, byte in enumerate(mask) if byte for i in range(8) if byte >> i & 1]
    require_sound(matcher)
    step = max(len(allowed) // TRIED_TOKENS, 1)
    for token in allowed[::step]:
        tried = matcher.deep_copy()
        tried.consume_token(token)
        require_sound(tried)
        if not tried.is_stopped():
            tried.compute_bitmask()
            require_sound(tried)
