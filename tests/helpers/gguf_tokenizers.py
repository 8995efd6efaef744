"""GGUF files of tokenizers with tiny vocabularies, the originals that they stand for, and texts to compare both."""

import json
import unicodedata
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from jspec.checkpoints.gguf.header import read_header
from jspec.checkpoints.gguf.tokenizer import tokenizer_files
from jspec.checkpoints.tokenizer import load_tokenizer

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
