"""Tokenizers from GGUF files make the tokens that the original ones make, with transformers' own classes to compare."""

# ruff: noqa: RUF001
import json
import logging
from pathlib import Path

import pytest
from gguf_tokenizers import (
    BYTE,
    CHAT,
    CONTROL,
    NORMAL,
    OF_LLAMA_CPP,
    ORIGINALS,
    OTHERS,
    SPECIAL,
    TEXTS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    byte_level,
    byte_level_file,
    differences,
    load,
    original,
    transformers,
    write,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers

from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.gguf.header import read_header
from jspec.checkpoints.gguf.pre_tokenizers import WORDS
from jspec.checkpoints.gguf.tokenizer import tokenizer_files
from jspec.checkpoints.tokenizer import load_tokenizer
from jspec.text.chat_template import prompt_tokens


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
