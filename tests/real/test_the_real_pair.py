"""A real target and its draft, Qwen2.5-Coder of 1.5B and 0.5B parameters: logits, texts, accepted drafts, and the doctor.

This file comes last, and needs 14 GB where it reads GGUF files, and 12 elsewhere: the larger model in float32 takes 6."""

import re

import numpy as np
import pytest
from real_models import ASKED, QWEN, QWEN_LARGE, divergence, folder, gguf_file, passages_of, prompts_of, read, written
from real_models import reference_model as model_of

import jspec
from jspec.cli import main

PROMPTS, TOKENS, DRAFTS = 6, 48, 4
PROMPTS_OF_FILES, TOKENS_OF_FILES = 3, 24  # their weights are dequantised at every pass, which takes a CPU long
LEAST, LEAST_OF_FILES, APART = 2.51, 2.84, 8.5e-4  # accepted drafts of a round, and nats a token, as in the other files


@pytest.fixture(scope="module")
def expected(load) -> tuple[list[list[int]], np.ndarray]:
    """transformers' greedy texts, and its logits of a passage."""
    load.clear()
    model = model_of(QWEN_LARGE)
    return written(model, prompts_of(QWEN_LARGE, PROMPTS), TOKENS), read(model, passages_of(QWEN_LARGE)[0])


def drafted(llm, prompts: int = PROMPTS, tokens: int = TOKENS) -> tuple[list[list[int]], float]:
    greedy = jspec.SamplingParams(temperature=0.0, max_tokens=tokens)
    results = llm.generate(prompts_of(QWEN_LARGE, prompts), greedy)
    accepted = sum(result.stats.num_accepted_draft_tokens for result in results)
    return [result.token_ids for result in results], accepted / sum(result.stats.num_steps for result in results)


def test_texts_and_logits_with_drafts_of_the_smaller_model(load, expected):
    llm, (theirs, logits) = load(QWEN_LARGE, folder(QWEN), max_batch=PROMPTS, num_draft_tokens=DRAFTS), expected
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
    target, draft, asked = gguf_file(QWEN_LARGE), gguf_file(QWEN), (PROMPTS_OF_FILES, TOKENS_OF_FILES)
    texts, accepted = drafted(load(target, draft, max_batch=PROMPTS_OF_FILES, num_draft_tokens=DRAFTS), *asked)
    plain = load(target, max_batch=PROMPTS_OF_FILES)
    found = np.asarray(plain.logits(passages_of(QWEN_LARGE)[0]))
    assert texts == drafted(plain, *asked)[0]
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


def test_the_doctor_proves_that_a_seed_means_one_text(load, capsys, tmp_path):
    """With as little as shows every way that it has: two prompts, eight tokens, and rounds of one draft and of two."""
    load.clear()
    (prompts := tmp_path / "prompts.txt").write_text("\n".join(ASKED[::6]), "utf-8")
    names = ["--target", str(folder(QWEN_LARGE)), "--draft", str(folder(QWEN)), "--prompts", str(prompts)]
    status = main(["doctor", "--exact", *names, "--max-tokens", "8", "--num-draft-tokens", "2"])
    said = capsys.readouterr().out
    assert status == 0, said
    assert re.search(r"\b2 drafts, rejection +0 of 2 +0 of 16 ", said), said
    assert said.strip().endswith("exact: 0 of 34 texts and 0 bits of 304 log-probabilities differ"), said
