"""Drafts of every kind change no text of a real model, and as many are accepted as once were."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from real_models import QWEN, SMOL, TOKENS, folder, gguf_file, reference
from safetensors.numpy import load_file, save_file

import jspec

ROOT = Path(__file__).parents[2]
DRAFTS = 4
# Accepted drafts of a round of four, less a tenth of what was measured.
LEAST = {
    "itself": 3.6,
    "ngram": 0.25,
    "lookup": 2.07,
    "int8": 3.12,
    "int4": 2.1,
    "vocabulary": 2.37,
    "fewer rows": 3.6,
    "gguf": 3.58,
}


def greedy(llm, prompts) -> tuple[list[list[int]], float]:
    """The texts, and the mean number of accepted drafts in a round."""
    results = llm.generate(prompts, jspec.SamplingParams(temperature=0.0, max_tokens=TOKENS))
    accepted = sum(result.stats.num_accepted_draft_tokens for result in results)
    return [result.token_ids for result in results], accepted / sum(result.stats.num_steps for result in results)


def assert_lossless(name: str, llm, least: float):
    expected = reference(name)
    texts, accepted = greedy(llm, expected.prompts)
    assert texts == expected.texts
    assert accepted >= least


@pytest.mark.parametrize("kind", ["itself", "ngram", "lookup", "int8", "int4", "vocabulary", "gguf"])
def test_drafts(load, converted, tmp_path, kind):
    drafts = {
        "itself": lambda: folder(SMOL),
        "lookup": lambda: converted(SMOL, "--quantize", "int4"),
        "ngram": lambda: "ngram",
        "int8": lambda: converted(SMOL, "--quantize", "int8"),
        "int4": lambda: converted(SMOL, "--quantize", "int4"),
        "vocabulary": lambda: with_vocabulary(converted, tmp_path),
        "gguf": lambda: gguf_file(SMOL),
    }
    how = {"lookup": True} if kind == "lookup" else {}
    llm = load(SMOL, drafts[kind](), num_draft_tokens=DRAFTS, **how)
    assert_lossless(SMOL, llm, LEAST[kind])


def with_vocabulary(converted, tmp_path) -> Path:
    """A draft model with 8,192 of 49,152 tokens, those of the project's own texts."""
    texts = [path.read_text("utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "jspec").glob("*/*.py")))]
    (corpus := tmp_path / "corpus.txt").write_text("\n".join(texts), "utf-8")
    return converted(SMOL, "--draft-vocabulary", "8192", "--corpus", str(corpus))


@pytest.fixture(scope="module")
def with_fewer_rows(tmp_path_factory) -> Path:
    """Qwen's folder without 271 rows of padding in the embedding, which is the output head, too."""
    source, out, rows = folder(QWEN), tmp_path_factory.mktemp("fewer") / "rows", 151_665
    out.mkdir()
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, out)
    weights = load_file(source / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape[0] > rows
    weights["model.embed_tokens.weight"] = np.ascontiguousarray(weights["model.embed_tokens.weight"][:rows])
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(fields | {"vocab_size": rows}))
    return out


def test_a_draft_with_less_padding_in_its_vocabulary(load, with_fewer_rows):
    llm = load(QWEN, with_fewer_rows, num_draft_tokens=DRAFTS)
    assert_lossless(QWEN, llm, LEAST["fewer rows"])


def test_a_target_with_less_padding_in_its_vocabulary(load, with_fewer_rows):
    llm = load(with_fewer_rows, folder(QWEN), num_draft_tokens=DRAFTS)
    assert_lossless(QWEN, llm, LEAST["fewer rows"])


def test_sampled_texts_of_a_draft_with_less_padding(load, with_fewer_rows):
    """``match`` with ``coupled`` drafts gives a seed one text, whatever drafts: padding is in no one's noise."""
    prompts, params = reference(QWEN).prompts, jspec.SamplingParams(temperature=1.0, seed=3, max_tokens=24)
    how = {"verify": "match", "draft_sampling": "coupled", "num_draft_tokens": DRAFTS}
    drafted = load(QWEN, with_fewer_rows, **how).generate(prompts, params)
    assert sum(result.stats.num_accepted_draft_tokens for result in drafted) > 0
    plain = load(QWEN).generate(prompts, params)
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
