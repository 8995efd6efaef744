"""Text that grows with its tokens, over the families of tokenizers: prompt and completion read as one."""

import numpy as np
import pytest
from tokenizer_families import FAMILIES, WORDS

from jspec.text.detokenizer import MAX_HELD, MAX_SETTLED, REPLACEMENT, Detokenizer

every_family = pytest.mark.parametrize("name", FAMILIES)


def detokenized(family, prompt, tokens, sizes=(1,)) -> str:
    """The text when tokens come ``sizes[0]`` at a time, then ``sizes[1]``, .. and so on again."""
    text, start, returned = Detokenizer(family.decode, prompt), 0, ""
    while start < len(tokens):
        for size in sizes:
            returned += text.add(tokens[start : start + size])
            start += size
    assert returned == text.text
    return text.text + text.held


def random_text(rng) -> str:
    """Words with and without spaces between them, some of characters that only bytes can write."""
    others = ("é", "€", "😀", "\n", "  ", " ", " ", " ", "�", "ß", "x.")
    return "".join(rng.choice([*WORDS, *others]) for _ in range(rng.integers(1, 40)))


def random_ids(family, rng, most: int = 60) -> list[int]:
    """Any tokens at all, special ones more often than others."""
    specials = np.repeat(family.special, family.size // 20)
    return rng.choice(np.concatenate([np.arange(family.size), specials]), rng.integers(1, most)).tolist()


def without_incomplete(before: str, whole: str) -> str:
    """The text of a prompt that ``whole`` begins with: all of it, but for an incomplete character at its end."""
    while not whole.startswith(before):
        assert before.endswith(REPLACEMENT)
        before = before[:-1]
    return before


@every_family
def test_prompt_and_completion_join_to_the_decoded_text(name):
    """Wherever a text is cut, within a character too."""
    family, rng = FAMILIES[name](), np.random.default_rng(0)
    for _ in range(150):
        tokens = family.encode(random_text(rng))
        cut = int(rng.integers(0, len(tokens) + 1))
        prompt, new = tokens[:cut], tokens[cut:]
        whole = family.decode(tokens)
        before = without_incomplete(family.decode(prompt), whole)
        for sizes in ((1,), (3, 1), (len(tokens),)):
            assert before + detokenized(family, prompt, new, sizes) == whole


@every_family
def test_any_tokens_stream_to_the_decoded_text(name):
    """Also such as no text has. However many come at a time, the text is the same; and it is that of the whole, unless
    bytes are no characters, of which the decoders of byte tokens make something else than of the same bytes alone."""
    family, rng = FAMILIES[name](), np.random.default_rng(1)
    compared = 0
    for _ in range(300):
        prompt, new = random_ids(family, rng, 20), random_ids(family, rng)
        if name == "sentencepiece":  # most of its vocabulary is bytes
            prompt, new = ([t for t in ids if not 3 <= t < 259 or rng.random() < 0.02] for ids in (prompt, new))
        texts = {detokenized(family, prompt, new, sizes) for sizes in ((1,), (2,), (5, 1, 3), (len(new) or 1,))}
        assert len(texts) == 1
        whole = family.decode(prompt + new)
        if REPLACEMENT not in whole or name == "byte_level":
            assert without_incomplete(family.decode(prompt), whole) + texts.pop() == whole
            compared += 1
    assert compared > 100


def test_first_space_of_a_completion_is_kept():
    """Decoded alone, the tokens would be ``the cat``."""
    family = FAMILIES["sentencepiece"]()
    prompt, whole = family.encode("x"), family.encode("x the cat")
    assert whole[: len(prompt)] == prompt
    new = whole[len(prompt) :]
    assert family.decode(new) == "the cat"
    assert detokenized(family, prompt, new) == " the cat"
    assert detokenized(family, [1], family.encode("the cat")[1:]) == "the cat"  # nothing before it but <s>


def test_special_tokens_at_the_end_of_a_prompt_do_not_hide_its_text():
    """As after a chat template: the space before the first word shows only beside text."""
    family = FAMILIES["sentencepiece"]()
    the = family.tokenizer.token_to_id("▁the")
    for count in (1, 5, 6, 30):
        prompt = [*family.encode("x"), *[2] * count]
        assert family.decode([*prompt, the]) == "x the"
        assert detokenized(family, prompt, [the]) == " the"


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_a_character_of_several_tokens_is_held_back(name):
    family = FAMILIES[name]()
    prompt, tokens = family.encode("x"), family.encode("x€")[-3:]
    text = Detokenizer(family.decode, prompt)
    assert [text.add([token]) for token in tokens[:2]] == ["", ""]
    assert (text.text, text.held.strip(REPLACEMENT)) == ("", "")
    assert text.held.startswith(REPLACEMENT)
    assert text.add(tokens[2:]) == "€"
    assert (text.text, text.held) == ("€", "")
    assert text.add(tokens[:1]) == ""  # a second one, cut short, does not take the first one away
    assert (text.text, text.held) == ("€", REPLACEMENT)
    assert detokenized(family, [*prompt, *tokens[:2]], tokens[2:]) == "€"  # the prompt ends within it


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_replacement_character_in_a_text_is_shown(name):
    family = FAMILIES[name]()
    prompt, new = family.encode("x�"), family.encode("the ��.")
    assert detokenized(family, prompt, new).strip() == "the ��."
    assert Detokenizer(family.decode, prompt).held == ""


@every_family
def test_work_is_linear_in_the_text(name):
    """Tokens that the decoder reads for each token of a completion, however long it is and whatever it holds."""
    family, rng = FAMILIES[name](), np.random.default_rng(2)
    text = family.encode(" ".join(rng.choice(WORDS, 700)))
    for new in (text, rng.integers(family.size, size=2000).tolist(), [family.special[-1]] * 2000, [200] * 2000):
        for size in (1, 4):
            read = 0

            def decode(tokens):
                nonlocal read
                read += len(tokens)
                return family.decode(tokens)

            detokenizer = Detokenizer(decode, [])
            for start in range(0, len(new), size):
                detokenizer.add(new[start : start + size])
            assert read < 3 * (MAX_SETTLED + MAX_HELD + size) * len(new)
