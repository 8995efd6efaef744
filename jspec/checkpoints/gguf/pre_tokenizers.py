"""How byte-level vocabularies cut a text into words before they merge bytes, by the names that llama.cpp gives these rules.

The regular expressions are those of the original tokenizer.json files, which llama.cpp adapts to its own engine
(``src/llama-vocab.cpp``). Which names share a rule is as there, and so is ``default``. No GGUF file says whether accents are
composed first (NFC): the originals of Qwen, OLMo, MPT and Command R do so, and those that took over their rules."""

# ruff: noqa: RUF001
from typing import Any, NamedTuple

_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # of English words, cut off
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BREAKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGIT, _THREE = r"\p{N}", r"\p{N}{1,3}"


def _words(digits: str) -> str:
    return rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BREAKS}"


def _cased_words(digits: str, suffix: str) -> str:
    """Words that begin anew where a capital follows a small letter."""
    small, capital, mark = r"\p{Ll}\p{Lm}\p{Lo}\p{M}", r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"[^\r\n\p{L}\p{N}]?"
    names = rf"{mark}[{capital}]*[{small}]+{suffix}|{mark}[{capital}]+[{small}]*{suffix}"
    return rf"{names}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BREAKS}"


_QWEN35 = _words(_DIGIT).replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"^\s\p{L}", r"^\s\p{L}\p{M}")
_SEED = _words(_DIGIT).replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+")
_HAN = "[一-龥ࠀ-一가-퟿]+"
_LETTERS = (  # of DeepSeek LLM: Latin, Greek, Cyrillic, Armenian and a few more
    r"\s?"
    "[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ"
    "\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-"
    "Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
    rf"[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BREAKS}"
)


class Words(NamedTuple):
    """How a text is cut into words.

    Attributes:
      cuts: regular expressions; each cuts out what it finds in the parts that the former ones left.
      nfc: whether accents are composed first.
      whole: whether a word that is a token is taken as it is, and its bytes are not merged.
      bos: whether a text begins with the token for that, where the file does not say.
    """

    cuts: tuple[str, ...]
    nfc: bool = False
    whole: bool = False
    bos: bool = False

    @property
    def json(self) -> dict[str, Any]:
        """The normaliser and the pre-tokenizer as tokenizer.json has them."""
        cuts = [
            {"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False} for cut in self.cuts
        ]
        in_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        return {
            "normalizer": {"type": "NFC"} if self.nfc else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, in_bytes]},
        }


# Names as tokenizer.ggml.pre has them. Those on a line have the same rule.
_ROWS = {
    "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0 lfm2": Words((_words(_THREE),), whole=True, bos=True),
    "glm4 glm5": Words((_words(_THREE),), whole=True),
    "dbrx smaug-bpe chatglm-bpe": Words((_words(_THREE),)),
    "qwen2 deepseek-r1-qwen stablelm2 megrez kormo hunyuan": Words((_words(_DIGIT),), nfc=True),
    "qwen35": Words((_QWEN35,), nfc=True),
    "seed-coder": Words((_SEED,)),
    "gpt-4o llama4 kanana2 minimax-m2": Words((_cased_words(_THREE, f"{_SUFFIX}?"),)),
    "tekken": Words((_cased_words(_DIGIT, ""),), whole=True, bos=True),
    "gpt-2 phi-2 exaone4 granite-docling trillion mellum": Words((_GPT2,)),
    "olmo mpt": Words((_GPT2,), nfc=True),
    "smollm starcoder refact codeshell exaone mellum2": Words((_DIGIT, _GPT2)),
    "command-r": Words((_DIGIT, _GPT2), nfc=True),
    "deepseek-llm": Words((r"[\r\n]", _LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _HAN, _DIGIT)),
    "deepseek-coder": Words((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, _DIGIT)),
    "deepseek-v3 hunyuan-dense joyai-llm": Words((_THREE, "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3)),
    "default": Words((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
WORDS = {name: words for names, words in _ROWS.items() for name in names.split()}
