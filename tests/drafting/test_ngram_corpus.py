"""Prompt lookup over a corpus, compared with a few lines of Python, and used through ``jspec.load``."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from looked_up import B, K, drafts_of, lookup, lookup_context
from tiny import SMALL, tiny_checkpoint

import jspec
from jspec.config import ModelConfig
from jspec.drafting.corpus import END, MAX_CORPUS_TOKENS, NGramCorpus, prepare

TARGET = ModelConfig("LlamaForCausalLM", 97, 64, 96, 2, 4, 2, 16, 128)


def lookup_in(corpus: list[list[int]], text: list[int], shortest: int, longest: int) -> list[int]:
    """What followed the first occurrence in ``corpus`` of the longest suffix of ``text`` that has a token after it."""
    for n in range(min(longest, len(text)), shortest - 1, -1):
        for other in corpus:
            for end in range(n, len(other)):
                if other[end - n : end] == text[len(text) - n :]:
                    return other[end : end + K]
    return []


@functools.partial(jax.jit, static_argnums=(1, 2))
def propose(corpus, shortest, longest, tokens, length, room):
    return NGramCorpus(K, shortest, longest, corpus).propose((), lookup_context(tokens, length, room))[1]


def drafts(corpus, texts, shortest=1, longest=4, room=K) -> list[list[int]]:
    flat = jnp.array([token for text in corpus for token in (*text, END)], jnp.int32)
    return drafts_of(functools.partial(propose, flat, shortest, longest), texts, room)


CORPUS = [[1, 2, 3], [9, 2, 7, 7, 8, 1, 2, 5, 6, 4, 3, 8, 8], [2, 4], [6]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([0, 1, 2], [3]),  # of two equal matches the first, up to the end of its text
        ([8, 1, 2], [5, 6, 4, 3, 8, 8]),  # a longer match wins
        ([2], [3]),
        ([7], [7, 8, 1, 2, 5, 6]),
        ([6], [4, 3, 8, 8]),
        ([5, 0], []),
        ([3, 0, 3], [0, 3, 0, 3, 0, 3]),  # the text's own continuation goes first, as ``NGram`` makes it
    ],
)
def test_drafts_continue_known_texts(text, expected):
    assert drafts(CORPUS, [text]) == [expected]
    assert (lookup(text, 1, 4) or lookup_in(CORPUS, text, 1, 4)) == expected


@pytest.mark.parametrize("room", [0, 1, K])
def test_no_more_drafts_than_room(room):
    assert drafts(CORPUS, [[8, 1, 2]], room=room) == [[5, 6, 4, 3, 8, 8][:room]]


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 4), (2, 3)])
def test_drafts_equal_the_reference(shortest, longest):
    rng = np.random.default_rng(shortest * 10 + longest)
    corpus = [rng.integers(8, size=n).tolist() for n in (20, 1, 2, 0, 17)]
    from_text = from_corpus = nothing = 0
    for _ in range(30):
        texts = [rng.integers(8, size=rng.integers(1, 12)).tolist() for _ in range(B)]
        in_text = [lookup(text, shortest, longest) for text in texts]
        expected = [
            found or lookup_in(corpus, text, shortest, longest) for found, text in zip(in_text, texts, strict=True)
        ]
        assert drafts(corpus, texts, shortest, longest) == expected
        from_text += sum(found is not None for found in in_text)
        from_corpus += sum(found is None and len(drafted) > 0 for found, drafted in zip(in_text, expected, strict=True))
        nothing += sum(not drafted for drafted in expected)
    assert min(from_text, from_corpus) > 10
    assert nothing > 10 or shortest == 1


class Letters:
    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text.encode().decode()]


def test_corpus_from_a_file_texts_or_tokens(tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_text("abc")
    for corpus, expected in (
        (file, [0, 1, 2, END]),
        (str(file), [0, 1, 2, END]),
        (["ab", "c"], [0, 1, END, 2, END]),
        ([[4, 5], np.array([6])], [4, 5, END, 6, END]),
    ):
        array = prepare(corpus, Letters(), TARGET)
        assert array.dtype == jnp.int32
        assert array.tolist() == expected


@pytest.mark.parametrize(
    ("corpus", "tokenizer", "message"),
    [
        ("no/such/file.txt", Letters(), "ngram_corpus='no/such/file.txt': expected the path of a text file"),
        (["ab"], None, r"ngram_corpus\[0\] is text, but the checkpoint has no tokenizer"),
        ([[1], [2, 97]], None, r"ngram_corpus\[1\]=97: expected token ids in 0..96"),
        ([[-1]], None, r"ngram_corpus\[0\]=-1: expected token ids"),
        (["a", "b\ud800"], Letters(), r"ngram_corpus\[1\] has '\\ud800' at character 1, half of a surrogate pair"),
        ([[0.5]], None, "expected a text or a flat list of token ids"),
        ([1, 2], None, "a flat list of token ids: expected a list of such lists"),
        ([], None, "holds no tokens"),
        ([[]], None, "holds no tokens"),
        ([np.zeros(MAX_CORPUS_TOKENS, int)], None, "over 4,194,305 tokens': expected at most 4,194,304"),
    ],
)
def test_invalid_corpus_is_refused(corpus, tokenizer, message):
    with pytest.raises(ValueError, match=message):
        prepare(corpus, tokenizer, TARGET)


GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
PROMPTS = [[3, 4, 5], [7]]


def test_text_of_the_corpus_is_drafted_from_it(tmp_path):
    """The corpus is an argument of the compiled programs: another of the same size replaces it without compiling."""
    folder = tiny_checkpoint(tmp_path / "target")
    plain = [result.token_ids for result in jspec.generate(jspec.load(folder, **SMALL), PROMPTS, **GREEDY)]
    texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, plain, strict=True)]
    speculation = jspec.Speculation(num_draft_tokens=3, ngram_min=2)
    llm = jspec.load(folder, draft="ngram", ngram_corpus=texts, speculation=speculation, **SMALL)
    assert llm.method == "ngram_corpus"
    rates = []
    for corpus in (texts, [[0] * len(text) for text in texts]):
        llm.engine.replace_draft(prepare(corpus, None, llm.target.config))
        results = jspec.generate(llm, PROMPTS, **GREEDY)
        assert [result.token_ids for result in results] == plain
        rates.append(sum(result.stats.num_accepted_draft_tokens for result in results))
    assert rates[0] > rates[1] + 20
    assert llm.engine.num_compilations == 3


@pytest.mark.parametrize("draft", [None, "draft"])
def test_corpus_without_ngram_drafting_is_refused(tmp_path, draft):
    with pytest.raises(ValueError, match=f"ngram_corpus has no place with draft={draft!r}: expected draft='ngram'"):
        jspec.load(tmp_path, draft, ngram_corpus=[[1]])
