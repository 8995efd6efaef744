"""Tokenizers from GGUF files make the tokens that the original tokenizers make, with transformers' own classes to compare.

With JSPEC_GGUF_FILES, a folder of GGUF files, those are read too. Beside vocabularies that llama.cpp publishes
(``ggml-vocab-*.gguf``) lie texts and the tokens that the original tokenizers made of them."""

# ruff: noqa: RUF001
import json
import logging
import os
import unicodedata
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.gguf.header import read_header
from jspec.checkpoints.gguf.pre_tokenizers import WORDS
from jspec.checkpoints.gguf.tokenizer import tokenizer_files
from jspec.checkpoints.tokenizer import load_tokenizer
from jspec.text.chat_template import prompt_tokens

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

TEXTS = (
    "def f(x):\n\treturn {'é€': 1_000}  # ok\n\n\n    y = x[-1]\r\n",
    "12345 3.14159 2²  7 x=  8\t9 ٣٤ ½",
    "I'm HE'LL don't we'RE camelCase HTTPServer snake_case",
    "한국어 中文字符と日本語 กำลัง हिन्दी Ελληνικά Кириллица",
    "café naïve Ångström",
    unicodedata.normalize("NFD", "café naïve Ångström é"),
    "🚀👩‍👩‍👧 😶‍🌫️ ™",
    "  two   three    four     \n \n\n \t\t x" + " " * 40 + "y\n",
    " a", "", " ", "\n", "\t\t", "▁ literal ▁▁", "Ġ Ċ",
    "<|im_start|>user\nHi <|im_end|>\n<tool_call>{}</tool_call>[PAD7][PAD8]<|endoftext|>",
    "<s>[INST] hi [/INST]</s> <0x0A> <unk>",
    "!!!??? ...... ------ ====== ''''''```` \"\"\" ~/a/b",
)  # fmt: skip
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPECIAL = {"<|endoftext|>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": CONTROL}
OTHERS = {"<tool_call>": USER_DEFINED, "</tool_call>": USER_DEFINED, "[PAD7]": UNUSED}
OLD_PADDING = "[PAD8]"  # to which older converters gave the type of tokens that users define
# The names that llama.cpp's src/llama-vocab.cpp compares tokenizer.ggml.pre with (October 2026).
OF_LLAMA_CPP = """
    a.x-4.0 afmoe bailingmoe bailingmoe2 bloom chameleon chatglm-bpe codeshell cohere2moe command-r dbrx
    deepseek-coder deepseek-llm deepseek-r1-qwen deepseek-v3 default exaone exaone-moe exaone4 f2llmv2 falcon
    falcon-h1 falcon3 gemma4 gigachat glm4 glm5 gpt-2 gpt-4o gpt3-finnish granite-docling granite-embed-multi-311m
    granite-embed-multi-97m grok-2 hunyuan hunyuan-dense hy_v4 jais jais-2 jina-de jina-es jina-v1-en jina-v2-code
    jina-v2-de jina-v2-es jina-v5-nano joyai-llm kanana2 kimi-k2 kormo laguna lfm2 llada-moe llama-bpe llama-v3 llama3
    llama4 megrez mellum mellum2 midm-2.0 minerva-7b minicpm5 minimax-m2 modern-bert mpt olmo phi-2 pixtral poro-chat
    qwen2 qwen35 refact roberta-bpe sarvam-moe seed-coder smaug-bpe smollm solar-open spark2_5 stablelm2 starcoder
    superbpe talkie tekken tiny_aya trillion ufakzeka viking whitespace youtu
"""


def write(path: Path, model: str | None, tokens: dict[str, int], **keys) -> Path:
    """A GGUF file without tensors. ``tokens`` is text -> type; in ``keys``, ``__`` stands for a dot."""
    writer = gguf.GGUFWriter(path, keys.pop("arch", "llama"))
    if model is not None:
        writer.add_tokenizer_model(model)
        writer.add_token_list(list(tokens))
        writer.add_token_types(list(tokens.values()))
    for name, value in keys.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def load(path: Path, folder: Path) -> Any:
    """The tokenizer of a GGUF file, as one of a checkpoint folder."""
    folder.mkdir()
    for name, content in tokenizer_files(read_header(path)).items():
        (folder / name).write_text(json.dumps(content))
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def differences(tokenizer, original, texts=TEXTS) -> list:
    """Each text of which two tokenizers make other tokens, or other text of those, with both."""
    found = []
    for text in texts:
        ours, theirs = (one.encode(text, add_special_tokens=False) for one in (tokenizer, original))
        back = [
            [one.decode(ids, skip_special_tokens=skip) for skip in (True, False)]
            for one, ids in ((tokenizer, ours), (original, theirs))
        ]
        if ours != theirs or back[0] != back[1]:
            found.append((text, ours, theirs, *back))
    return found


@cache
def byte_level() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary of bytes whose merges go across words, digits and lines, so that the tokens show where a rule cuts."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    plain = [text for text in TEXTS if "<" not in text]
    texts = [*plain, *(unicodedata.normalize("NFC", text) for text in plain)] * 2
    trained.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    tokens.append("Ġworthwhile")  # no merges lead to it
    return {token: i for i, token in enumerate([*tokens, *SPECIAL, *OTHERS, OLD_PADDING])}, [
        tuple(pair) for pair in model["merges"]
    ]


def byte_level_file(path: Path, pre: str, **keys) -> Path:
    vocab, merges = byte_level()
    types = {token: (SPECIAL | OTHERS).get(token, NORMAL) for token in vocab} | {OLD_PADDING: USER_DEFINED}
    return write(path, "gpt2", types, tokenizer_pre=pre, token_merges=[" ".join(pair) for pair in merges], **keys)


def of_class(name: str, vocab: dict[str, int], merges: list[tuple[str, str]]):
    """The original tokenizer of a class of transformers."""
    return getattr(transformers, name)(vocab=vocab, merges=merges)


def of_parts(vocab: dict[str, int], merges: list[tuple[str, str]], *cuts, whole: bool = False):
    """The original tokenizer as tokenizer.json files put it together."""
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(cuts))  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def split(regex: str, vocab: dict[str, int], merges: list[tuple[str, str]], **options):
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return of_parts(vocab, merges, pre_tokenizers.Split(Regex(regex), "isolated"), bytes_, **options)


def llama3(*model):
    from transformers.convert_slow_tokenizer import TikTokenConverter

    return split(TikTokenConverter("").pattern, *model, whole=True)


def o200k(*model):
    openai_public = pytest.importorskip("tiktoken_ext.openai_public")
    source = Path(openai_public.__file__).read_text()
    body = source[source.index("def o200k_base") :].split("pat_str = ", 1)[1].split("\n    return", 1)[0]
    return split(eval(body), *model)


def tekken(*model):
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    return split(mapping.GGUF_PRE_TOKENIZER_SPLITS["tekken"], *model, whole=True)


def with_digits(*model):
    digits = pre_tokenizers.Digits(individual_digits=True)
    return of_parts(*model, digits, pre_tokenizers.ByteLevel(add_prefix_space=False))


ORIGINALS = {
    "gpt-2": partial(of_class, "GPT2Tokenizer"),
    "qwen2": partial(of_class, "Qwen2Tokenizer"),
    "qwen35": partial(of_class, "Qwen3_5Tokenizer"),
    "command-r": partial(of_class, "CohereTokenizer"),
    "olmo": partial(of_class, "GPTNeoXTokenizer"),
    "smollm": with_digits,
    "llama-bpe": llama3,
    "gpt-4o": o200k,
    "tekken": tekken,
}


def original(pre: str):
    tokenizer = ORIGINALS[pre](*byte_level())
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in OTHERS.items() if kind == USER_DEFINED]
    )
    return tokenizer


class TestBytes:
    @pytest.mark.parametrize("pre", ORIGINALS)
    def test_tokens_are_those_of_the_original(self, pre, tmp_path):
        tokenizer = load(byte_level_file(tmp_path / "x.gguf", pre), tmp_path / "hf")
        assert differences(tokenizer, original(pre), [*TEXTS, "all worthwhile"]) == []
        assert tokenizer.get_vocab() == byte_level()[0]

    @pytest.mark.parametrize("pre", ORIGINALS)
    def test_the_tokens_of_another_rule_differ(self, pre, tmp_path):
        """So the test above would see a rule under a wrong name, and NFC or whole words that are missing."""
        tokenizer = original(pre)
        for other in ORIGINALS.keys() - {pre}:
            loaded = load(byte_level_file(tmp_path / f"{other}.gguf", other), tmp_path / other)
            assert differences(loaded, tokenizer, [*TEXTS, "all worthwhile"]), other

    @pytest.mark.parametrize(
        ("pre", "text", "words"),
        [
            # Its class of punctuation has the letters from A to z.
            ("deepseek-llm", "\n\nBon été 12a 中文 ab!?", "Ċ Ċ Bon ĠÃ© t Ã© Ġ 1 2 a Ġ ä¸Ńæĸĩ Ġab !?"),
            ("deepseek-coder", "\nab été 12 中文!?", "Ċ ab ĠÃ©tÃ© Ġ 1 2 Ġ ä¸Ńæĸĩ !?"),
            ("deepseek-v3", "12345 ab中文か!?x (f)\n", "123 45 Ġab ä¸Ńæĸĩãģĭ !? x Ġ( f )Ċ"),
            ("seed-coder", "ab 12!\nc", "ab Ġ 1 2 ! Ċ c"),
            ("glm4", "ab 12345!\nc", "ab Ġ 123 45 !Ċ c"),
            ("default", "a+b 12345", "a + b Ġ 123 45"),
        ],
    )
    def test_rules_that_transformers_has_no_class_for(self, pre, text, words):
        rules = Tokenizer(models.BPE())
        content = json.loads(rules.to_str()) | WORDS[pre].json
        cut = Tokenizer.from_str(json.dumps(content)).pre_tokenizer
        assert cut is not None
        assert [word for word, _ in cut.pre_tokenize_str(text)] == words.split(" ")

    def test_names_are_those_of_llama_cpp(self):
        assert WORDS.keys() <= set(OF_LLAMA_CPP.split())

    def test_regular_expressions_are_those_of_transformers(self):
        mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
        splits = {name: regex for name, regex in mapping.GGUF_PRE_TOKENIZER_SPLITS.items() if name in WORDS}
        assert {name: WORDS[name].cuts for name in splits} == {name: (regex,) for name, regex in splits.items()}

    @pytest.mark.parametrize("pre", ["kimi-k2", "nonsense", None])
    def test_an_unknown_rule_is_refused(self, pre, tmp_path):
        keys = {} if pre is None else {"tokenizer_pre": pre}
        path = write(tmp_path / "x.gguf", "gpt2", {"a": NORMAL}, token_merges=["a a"], **keys)
        with pytest.raises(
            Refusal, match=rf"x\.gguf: tokenizer\.ggml\.pre={pre!r}: expected one of .*command-r.*qwen35"
        ):
            tokenizer_files(read_header(path))

    def test_what_model_type_says_changes_nothing(self, tmp_path):
        """transformers takes Qwen2Tokenizer for any qwen2 with another class, which makes the same tokens."""
        path = byte_level_file(tmp_path / "x.gguf", "qwen2")
        plain = load(path, tmp_path / "hf")
        (tmp_path / "hf" / "config.json").write_text('{"model_type": "qwen2"}')
        assert differences(load_tokenizer(tmp_path / "hf"), plain) == []


PIECES = {"<pad>": CONTROL, "<eos>": CONTROL, "<bos>": CONTROL, "<unk>": UNKNOWN}
LLAMA = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
RUNS = [*("\n" * n for n in range(1, 32)), *("▁" * n for n in range(2, 32)), *("\t" * n for n in range(1, 9))]


def pieces(first: dict[str, int], defined: list[str]) -> tuple[dict[str, int], dict[str, float]]:
    """text -> type, and the scores, of a vocabulary like SentencePiece's; the last of the best pieces has the lowest."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")  # pyright: ignore[reportAttributeAccessIssue]
    trained.train_from_iterator(TEXTS * 2, trainers.BpeTrainer(vocab_size=1200, show_progress=False))
    learnt = sorted(trained.get_vocab(), key=lambda token: (len(token) == 1, trained.get_vocab()[token]))
    tokens = first | dict.fromkeys(defined, USER_DEFINED) | {f"<0x{i:02X}>": BYTE for i in range(256)}
    rare = "中🚀é"  # written as bytes
    tokens |= {token: NORMAL for token in learnt if token not in tokens and not set(token) & set(rare)}
    scores = {token: -float(i) if kind == NORMAL else 0.0 for i, (token, kind) in enumerate(tokens.items())}
    return tokens, scores


def pieces_file(path: Path, tokens: dict[str, int], scores: dict[str, float], **keys) -> Path:
    """As converters write it: spaces in tokens that users define, and the lowest score for all but pieces and bytes."""
    spelt = {token.replace("▁", " ") if kind == USER_DEFINED else token: kind for token, kind in tokens.items()}
    lowest = [score if tokens[token] in (NORMAL, BYTE) else -1000.0 for token, score in scores.items()]
    return write(path, "llama", spelt, tokenizer_pre="default", token_scores=lowest, **keys)


def merges_of(tokens: dict[str, int], scores: dict[str, float]):
    from transformers.tokenization_utils_base import generate_merges

    return generate_merges({token: i for i, token in enumerate(tokens)}, scores)


class TestPieces:
    def test_gemma(self, tmp_path):
        tokens, scores = pieces(PIECES, [*RUNS, "<table>", "</s>"])
        path = pieces_file(tmp_path / "x.gguf", tokens, scores, bos_token_id=2, eos_token_id=1, unk_token_id=3,
                           pad_token_id=0, add_space_prefix=False)  # fmt: skip
        tokenizer = load(path, tmp_path / "hf")
        vocab, merges = {token: i for i, token in enumerate(tokens)}, merges_of(tokens, scores)
        assert tokenizer_files(read_header(path))["tokenizer.json"]["model"]["merges"] == [
            pair for pair in merges if "".join(pair) not in PIECES
        ]
        reference = transformers.GemmaTokenizer(vocab=vocab, merges=merges)
        reference.add_tokens(
            [AddedToken(token, normalized=False) for token, kind in tokens.items() if kind == USER_DEFINED]
        )
        assert differences(tokenizer, reference, [*TEXTS, "<table> \n</s>", "x" + " " * 33 + "y"]) == []
        assert tokenizer.get_vocab() == vocab
        assert tokenizer.encode("a") == [vocab["<bos>"], *tokenizer.encode("a", add_special_tokens=False)]

    def test_llama(self, tmp_path):
        """The reference has no space before a text that begins with one, where SentencePiece has."""
        tokens, scores = pieces(LLAMA, [])
        tokenizer = load(pieces_file(tmp_path / "x.gguf", tokens, scores), tmp_path / "hf")
        vocab, merges = {token: i for i, token in enumerate(tokens)}, merges_of(tokens, scores)
        reference = transformers.LlamaTokenizer(vocab=vocab, merges=merges, legacy=True)
        whole = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        whole.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # pyright: ignore
        whole.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        whole.add_special_tokens(list(LLAMA))
        stored = transformers.PreTrainedTokenizerFast(tokenizer_object=whole)
        assert differences(tokenizer, stored) == []
        without = [text for text in TEXTS if not text.startswith((" ", "▁"))]
        assert [text for text, *_ in differences(tokenizer, reference, without)] == [
            "<s>[INST] hi [/INST]</s> <0x0A> <unk>"
        ]
        assert tokenizer.encode("a")[0] == 1
        assert tokenizer.decode(tokenizer.encode("a b"), skip_special_tokens=True) == "a b"

    def test_mistral_has_a_space_before_the_first_part_alone(self, tmp_path):
        tokens, scores = pieces(LLAMA | {"[INST]": CONTROL, "[AVAILABLE_TOOLS]": CONTROL}, [])
        tokenizer = load(pieces_file(tmp_path / "x.gguf", tokens, scores), tmp_path / "hf")
        vocab, merges = {token: i for i, token in enumerate(tokens)}, merges_of(tokens, scores)
        reference = transformers.LlamaTokenizer(vocab=vocab, merges=merges, legacy=False)
        reference.add_special_tokens({"additional_special_tokens": ["[INST]", "[AVAILABLE_TOOLS]"]})
        assert differences(tokenizer, reference, [*TEXTS, "<s>[INST] hi[INST]x", "hi [INST]"]) == []

    @pytest.mark.parametrize("arch", ["phi3", "llama"])
    def test_tokens_of_phi_3_take_the_spaces_behind_them(self, arch, tmp_path):
        tokens, scores = pieces(LLAMA | {"<|user|>": CONTROL}, [])
        tokenizer = load(pieces_file(tmp_path / "x.gguf", tokens, scores, arch=arch), tmp_path / "hf")
        user = tokenizer.encode("<|user|>", add_special_tokens=False)
        behind = tokenizer.encode("<|user|>\n", add_special_tokens=False)
        assert (behind == user) == (arch == "phi3")
        assert tokenizer.encode("<s>\n") != tokenizer.encode("<s>")

    @pytest.mark.parametrize("model", ["gemma4", "llama"])
    def test_stored_merges_come_before_scores(self, model, tmp_path):
        tokens, scores = pieces(PIECES, [])
        merges = merges_of(tokens, scores)[::2]
        keys = {"token_scores": [-1000.0] * len(tokens), "token_merges": [" ".join(pair) for pair in merges]}
        ids = {"unk_token_id": 3, "bos_token_id": 2}
        path = write(tmp_path / "x.gguf", model, tokens, **keys, **ids, add_space_prefix=False)
        reference = transformers.GemmaTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
        assert differences(load(path, tmp_path / "hf"), reference) == []


class TestSettings:
    @pytest.mark.parametrize(
        ("pre", "keys", "bos", "eos"),
        [
            ("qwen2", {"add_bos_token": False}, False, False),
            ("qwen2", {"add_bos_token": True, "add_eos_token": True}, True, True),
            ("gpt-2", {}, False, False),
            ("llama-bpe", {}, True, False),
            ("llama-bpe", {"add_bos_token": False}, False, False),
        ],
    )
    def test_tokens_around_a_text(self, pre, keys, bos, eos, tmp_path):
        ids = {name: byte_level()[0][token] for name, token in (("bos", "<|im_start|>"), ("eos", "<|im_end|>"))}
        path = byte_level_file(tmp_path / "x.gguf", pre, bos_token_id=ids["bos"], eos_token_id=ids["eos"], **keys)
        tokenizer = load(path, tmp_path / "hf")
        inner = tokenizer.encode("ab", add_special_tokens=False)
        assert tokenizer.encode("ab") == [ids["bos"]] * bos + inner + [ids["eos"]] * eos
        assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|im_start|>", "<|im_end|>", None)
        assert "<|im_start|>" not in tokenizer.decode(tokenizer.encode("ab<|im_start|>"), skip_special_tokens=True)

    def test_a_chat_is_rendered_as_by_the_original(self, tmp_path):
        messages = [{"role": "user", "content": "Hé <tool_call> 12"}, {"role": "assistant", "content": "  ok\n"}]
        tokenizer = load(byte_level_file(tmp_path / "x.gguf", "qwen2", chat_template=CHAT), tmp_path / "hf")
        reference = original("qwen2")
        reference.chat_template = CHAT
        tokens = prompt_tokens(tokenizer, 1000, messages)
        assert tokens == prompt_tokens(reference, 1000, messages)
        assert tokens.count(byte_level()[0]["<|im_start|>"]) == 2

    def test_several_chat_templates(self, tmp_path):
        named = [{"name": "default", "template": CHAT}, {"name": "tool_use", "template": "{{ 1 }}"}]
        tokenizer = load(byte_level_file(tmp_path / "x.gguf", "qwen2", chat_template=named), tmp_path / "hf")
        assert tokenizer.chat_template == {"default": CHAT, "tool_use": "{{ 1 }}"}

    def test_no_chat_template_is_made_up(self, tmp_path):
        assert load(byte_level_file(tmp_path / "x.gguf", "qwen2"), tmp_path / "hf").chat_template is None

    def test_a_large_vocabulary_of_mistral_is_not_suspected(self, tmp_path, caplog, monkeypatch):
        """transformers warns of the rule of those with more than 100,000 tokens."""
        vocab, merges = byte_level()
        types = {token: (SPECIAL | OTHERS).get(token, NORMAL) for token in vocab}
        types |= {f"[PAD{i}]": UNUSED for i in range(1000, 101_001)}
        path = write(
            tmp_path / "x.gguf", "gpt2", types, tokenizer_pre="tekken", token_merges=[" ".join(m) for m in merges]
        )
        tokenizer = load(path, tmp_path / "hf")
        assert len(tokenizer.get_vocab()) == len(types)
        (tmp_path / "hf" / "config.json").write_text('{"model_type": "mistral"}')
        monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
        with caplog.at_level(logging.WARNING, "transformers"):
            assert differences(load_tokenizer(tmp_path / "hf"), tokenizer) == []
        assert "incorrect regex" not in caplog.text

    @pytest.mark.parametrize("model", [None, "no_vocab"])
    def test_a_file_without_a_tokenizer(self, model, tmp_path):
        assert tokenizer_files(read_header(write(tmp_path / "x.gguf", model, {"a": NORMAL}))) == {}


GOOD = {"tokenizer_pre": "gpt-2", "token_merges": ["a b"]}


class TestDamage:
    @pytest.mark.parametrize(
        ("model", "tokens", "keys", "words"),
        [
            ("bert", ["a"], {}, r"model='bert': expected 'gpt2', 'llama' or 'gemma4'"),
            ("t5", ["a"], {}, "model='t5': expected 'gpt2'"),
            ("rwkv", ["a"], {}, "model='rwkv': expected 'gpt2'"),
            ("plamo2", ["a"], {}, "model='plamo2': expected 'gpt2'"),
            ("gpt2", ["a", "b", "a"], GOOD, r"tokens=.*expected no token twice; 'a' is 0 and 2"),
            (
                "gpt2",
                ["a", "b"],
                GOOD,
                r"merges=\['a b'\]: expected two tokens that are one together; 'a b' is no such",
            ),
            ("gpt2", ["a", "b", "ab"], GOOD | {"token_merges": ["a c"]}, "merges=.*'a c' is no such pair"),
            ("gpt2", ["a", "b", "ab"], GOOD | {"token_merges": ["ab"]}, "merges=.*'ab' is no such pair"),
            ("gpt2", ["a", "b", "ab"], {"tokenizer_pre": "gpt-2"}, "merges=None: expected a list of strings"),
            ("gpt2", ["a", "b", "ab"], GOOD | {"eos_token_id": 3}, r"eos_token_id=3: expected an integer in 0\.\.2"),
            (
                "gpt2",
                ["a", "b", "ab"],
                GOOD | {"token_types": [1, 1]},
                "token_type has 2 numbers of int32: expected 3 integers",
            ),
            (
                "gpt2",
                ["a", "b", "ab"],
                GOOD | {"token_types": [1, 1, 7]},
                r"token_type has 3 numbers of int32: expected integers in 0\.\.6",
            ),
            ("gpt2", ["a" * 1025, "b"], GOOD, "tokens=.*expected tokens of at most 1024 characters"),
            (
                "llama",
                ["<unk>", "a", "b"],
                {"token_scores": [0.0, 1.0]},
                "scores has 2 numbers of float32: expected 3 numbers",
            ),
            ("llama", ["<unk>", "a", "b"], {}, "scores=None: expected 3 numbers, one for each token"),
            (
                "llama",
                ["a", "b", "c"],
                {"token_scores": [0.0, float("nan"), 1.0]},
                "scores has 3 .*which pieces are merged first",
            ),
            ("llama", ["a", "b", "c"], {"token_scores": [-1000.0] * 3}, "scores has 3 .*which pieces are merged first"),
            (
                "gpt2",
                ["a", "b", "ab"],
                GOOD | {"array": ("tokenizer.chat_templates", ["x"])},
                r"chat_template\.x is missing",
            ),
            (
                "gpt2",
                ["a", "b", "ab"],
                GOOD | {"bool": ("tokenizer.chat_template", True)},
                "chat_template=True: expected a",
            ),
        ],
    )
    def test_is_refused(self, model, tokens, keys, words, tmp_path):
        writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
        writer.add_tokenizer_model(model)
        writer.add_token_list(tokens)
        for name, value in ({"token_types": [NORMAL] * len(tokens)} | keys).items():
            getattr(writer, f"add_{name}")(*(value if isinstance(value, tuple) else (value,)))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(Refusal, match=rf"x\.gguf: tokenizer\.(ggml\.)?{words}"):
            tokenizer_files(read_header(tmp_path / "x.gguf"))


def real_files(suffix: str) -> list[Path]:
    folder = os.environ.get("JSPEC_GGUF_FILES")
    return sorted(Path(folder).glob(f"*{suffix}")) if folder else []


def real(path: Path, folder: Path):
    header = read_header(path)
    return header.metadata, load(path, folder)


@pytest.mark.parametrize("path", real_files(".gguf.inp"), ids=lambda path: path.name)
def test_published_tokens(path, tmp_path):
    """Tokens that the original tokenizers made, beside vocabularies that llama.cpp publishes."""
    try:
        _, tokenizer = real(path.with_suffix(""), tmp_path / "hf")
    except Refusal as refusal:
        pytest.skip(str(refusal))
    texts = path.read_text("utf-8").split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".out").read_text("utf-8").split("\n")[: len(texts)]
    tokens = [[int(token) for token in line.split()] for line in lines]
    if "qwen35" in path.name:  # made without the NFC that transformers' own class has
        texts, tokens = zip(
            *[pair for pair in zip(texts, tokens, strict=True) if unicodedata.is_normalized("NFC", pair[0])],
            strict=True,
        )
    assert [tokenizer.encode(text, add_special_tokens=False) for text in texts] == list(tokens)


def marked(metadata, kind: int) -> list[str]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return [tokens[i] for i in np.flatnonzero(metadata["tokenizer.ggml.token_type"] == kind)]


@pytest.mark.parametrize("path", [p for p in real_files(".gguf") if "vocab" not in p.name], ids=lambda path: path.name)
def test_real_files(path, tmp_path):
    """The references are transformers' Qwen2Tokenizer, the parts of SmolLM's tokenizer.json, and for Gemma transformers' own
    reading of GGUF files, which differs in literal ▁▁ and in runs of more than 31 spaces."""
    metadata, tokenizer = real(path, tmp_path / "hf")
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    source = Path(__file__).read_text("utf-8")
    texts = [*TEXTS, *source.split("\n\n"), source[:2000]]
    if metadata["tokenizer.ggml.model"] == "gpt2":
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
        rule = {"qwen2": "qwen2", "smollm": "smollm"}[metadata["tokenizer.ggml.pre"]]
        reference = ORIGINALS[rule](vocab, merges)
    else:
        reference = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        texts = [text for text in texts if "▁▁" not in text and " " * 32 not in text]
    reference.clean_up_tokenization_spaces = False
    reference.add_special_tokens({"additional_special_tokens": marked(metadata, CONTROL)})
    defined = [token for token in marked(metadata, USER_DEFINED) if token.strip(" ")]
    reference.add_tokens([AddedToken(token, normalized=False) for token in defined])
    assert differences(tokenizer, reference, texts) == []
    assert tokenizer.encode("x")[0] == (vocab["<bos>"] if "<bos>" in vocab else vocab["x"])
    assert tokenizer.get_vocab().keys() == {token if token.strip(" ") else "▁" * len(token) for token in vocab}


def test_digits_behind_spaces_need_the_rule_of_smollm(tmp_path):
    """What transformers' own reading of GGUF files lacks, and a text on which it shows."""
    paths = [path for path in real_files(".gguf") if "smollm" in path.name]
    if not paths:
        pytest.skip("JSPEC_GGUF_FILES has no SmolLM")
    _, tokenizer = real(paths[0], tmp_path / "hf")
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("x =  3"))
    assert tokens == ["x", "Ġ=", "ĠĠ", "3"]
