"""A real target and its draft, Qwen2.5-Coder of 1.5B and 0.5B parameters: logits, texts, accepted drafts, and the doctor.

This file comes last, and needs 8 GB: the larger model in float32 takes 6."""

import numpy as np
import pytest
from real_models import QWEN, QWEN_LARGE, divergence, folder, gguf_file, passages_of, prompts_of, read, written
from real_models import reference_model as model_of

import jspec
from jspec.cli import main

PROMPTS, TOKENS, DRAFTS = 3, 24, 4
GREEDY = jspec.SamplingParams(temperature=0.0, max_tokens=TOKENS)
ENGINE = {"max_batch": PROMPTS, "num_draft_tokens": DRAFTS}
LEAST, LEAST_OF_FILES, APART = 2.98, 2.84, 8.5e-4  # accepted drafts of a round, and nats a token, as in the other files


@pytest.fixture(scope="module")
def expected(load) -> tuple[list[list[int]], np.ndarray]:
    """transformers' greedy texts, and its logits of a passage."""
    load.clear()
    model = model_of(QWEN_LARGE)
    return written(model, prompts_of(QWEN_LARGE, PROMPTS), TOKENS), read(model, passages_of(QWEN_LARGE)[0])


def drafted(llm) -> tuple[list[list[int]], float]:
    results = llm.generate(prompts_of(QWEN_LARGE, PROMPTS), GREEDY)
    accepted = sum(result.stats.num_accepted_draft_tokens for result in results)
    return [result.token_ids for result in results], accepted / sum(result.stats.num_steps for result in results)


def test_texts_and_logits_with_drafts_of_the_smaller_model(load, expected):
    llm, (theirs, logits) = load(QWEN_LARGE, folder(QWEN), **ENGINE), expected
    texts, accepted = drafted(llm)
    found = np.asarray(llm.logits(passages_of(QWEN_LARGE)[0]))
    assert np.abs(found - logits).max() <= 1e-4 * np.abs(logits).max()
    assert texts == theirs
    assert accepted >= LEAST


def test_plain_texts(load, expected):
    assert drafted(load(QWEN_LARGE, max_batch=PROMPTS))[0] == expected[0]


def test_gguf_files_of_both(load, expected):
    """With drafts and without. The folder has the file's output head for its embedding, too, whose codes are coarser in the
    file, and that moves distributions more than the rounding to bfloat16 does."""
    target, draft = gguf_file(QWEN_LARGE), gguf_file(QWEN)
    texts, accepted = drafted(load(target, draft, **ENGINE))
    plain = load(target, max_batch=PROMPTS)
    found = np.asarray(plain.logits(passages_of(QWEN_LARGE)[0]))
    assert texts == drafted(plain)[0]
    assert accepted >= LEAST_OF_FILES
    assert 0 < divergence([expected[1]], [found]) <= APART


def test_the_doctor_finds_nothing_wrong(load, capsys):
    load.clear()
    names = ["--target", str(folder(QWEN_LARGE)), "--draft", str(folder(QWEN)), "--max-tokens", "24"]
    status = main(["doctor", *names])
    said = capsys.readouterr().out
    assert status == 0, said
    assert "healthy" in said
    assert "wrong" not in said
