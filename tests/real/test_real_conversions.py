"""``jspec-convert`` and ``jspec doctor`` of real models."""

import re

import pytest
from real_models import SMALL, SMOL, TOKENS, folder, reference

import jspec
from jspec.cli import main


def doctor(capsys, *arguments) -> tuple[int, str]:
    """What ``jspec doctor`` returns, and what it prints."""
    capsys.readouterr()
    status = main(["doctor", *map(str, arguments)])
    return status, capsys.readouterr().out


@pytest.mark.parametrize("name", SMALL)
def test_converted_folders_have_the_texts_of_their_sources(load, converted, name):
    expected, out = reference(name), converted(name, "--verify", "logits")
    results = load(out).generate(expected.prompts, jspec.SamplingParams(temperature=0.0, max_tokens=TOKENS))
    assert [result.token_ids for result in results] == expected.texts


def test_the_doctor_finds_nothing_beside_transformers(capsys):
    status, said = doctor(capsys, "--target", folder(SMOL), "--reference", folder(SMOL), "--max-tokens", 24)
    assert status == 0, said
    assert "within the tolerance of float32" in " ".join(said.split())


def test_the_doctor_proves_that_a_seed_means_one_text(capsys, converted):
    draft = converted(SMOL, "--quantize", "int8")
    status, said = doctor(capsys, "--target", folder(SMOL), "--draft", draft, "--exact", "--max-tokens", 16)
    assert status == 0, said
    assert re.search(r"\b0 of (\d+) texts and 0 bits of (\d+) log-probabilities differ\s*$", said), said
