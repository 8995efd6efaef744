"""Datasets of small files, and random texts with the number of tokens asked for."""

import json

import pytest

from jspec.bench.datasets import Choice, Custom, RandomText, Sample, ShareGPT, SpecBench
from jspec.checkpoints.tokenizer import load_tokenizer
from jspec.commands.demo import FAMILY
from jspec.text.detokenizer import encode


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FAMILY / "target")


def file(tmp_path, content) -> Choice:
    path = tmp_path / "data.jsonl"
    path.write_text(content if isinstance(content, str) else "\n".join(map(json.dumps, content)))
    return Choice(path)


def in_order(choice: Choice, **changes) -> Choice:
    return Choice(choice.path, **{"shuffle": False, **changes})


def test_random_texts_have_the_number_of_tokens_asked_for(tokenizer):
    samples = RandomText(40, 16, 0.25, prefix_len=12).samples(30, tokenizer, 5)
    counts = [len(encode(tokenizer, sample.prompt, "a prompt")) for sample in samples]
    assert counts == [sample.prompt_len for sample in samples]
    exact = [12 + 30 <= count <= 12 + 50 for count in counts]
    assert sum(exact) >= 28  # some random texts never have exactly so many tokens
    assert len(set(counts)) > 5
    assert {sample.output_len for sample in samples} <= set(range(12, 21))
    assert len({sample.output_len for sample in samples}) > 3
    common = samples[0].prompt[:15]
    assert all(sample.prompt.startswith(common) for sample in samples)
    assert len({sample.prompt for sample in samples}) == 30


def test_random_texts_follow_the_seed(tokenizer):
    dataset = RandomText(20, 8)
    assert dataset.samples(3, tokenizer, 1) == dataset.samples(3, tokenizer, 1)
    assert dataset.samples(3, tokenizer, 1) != dataset.samples(3, tokenizer, 2)
    assert {sample.output_len for sample in dataset.samples(9, tokenizer, 1)} == {8}
    with pytest.raises(ValueError, match="expected --tokenizer"):
        dataset.samples(3, None, 1)


@pytest.mark.parametrize(
    ("lengths", "name"),
    [((0, 1), "input_len"), ((1, 0), "output_len"), ((1, 1, 1.0), "range_ratio"), ((1, 1, 0, -1), "prefix_len")],
)
def test_bad_lengths_are_refused(lengths, name):
    with pytest.raises(ValueError, match=f"random_{name}="):
        RandomText(*lengths)


LINES = [{"prompt": "one", "output_tokens": 3}, {"prompt": "two"}, {"prompt": "three", "more": 1}]


def test_custom_prompts_are_ordered_repeated_and_shuffled(tmp_path, tokenizer):
    choice = file(tmp_path, "\n".join([json.dumps(line) for line in LINES] + ["", "  "]))
    assert Custom(in_order(choice), 7).samples(2, None, 0) == [Sample("one", 7), Sample("two", 7)]
    repeated = Custom(in_order(choice), 7).samples(5, tokenizer, 0)
    assert [sample.prompt for sample in repeated] == ["one", "two", "three", "one", "two"]
    assert repeated[0].prompt_len == len(encode(tokenizer, "one", "a prompt"))
    assert len(Custom(in_order(choice, oversample=False)).samples(5, None, 0)) == 3
    orders = [tuple(sample.prompt for sample in Custom(choice).samples(3, None, seed)) for seed in range(9)]
    assert len(set(orders)) > 1
    assert orders[2] == tuple(sample.prompt for sample in Custom(choice).samples(3, None, 2))


def test_custom_lengths_come_from_the_lines(tmp_path):
    choice = file(tmp_path, LINES)
    with pytest.raises(ValueError, match=r'data.jsonl:2: expected "output_tokens"'):
        Custom(choice, -1).samples(1, None, 0)
    assert Custom(file(tmp_path, LINES[:1]), -1).samples(1, None, 0) == [Sample("one", 3)]


def conversation(*texts: str) -> dict:
    return {"conversations": [{"from": "someone", "value": text} for text in texts]}


def test_sharegpt_is_filtered_by_length(tmp_path, tokenizer):
    question, answer = "def read_config(path, default=None):", "    return open(path).read()"
    entries = [
        conversation(question, answer, "more"),
        conversation(question + " "),  # no answer
        conversation("a", answer),  # too short
        conversation(question, ""),  # too short an answer
        conversation("def f(x): " * 2000, answer),  # too long
    ]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(entries))
    tokens = [len(encode(tokenizer, text, "a text")) for text in (question, answer)]
    assert ShareGPT(Choice(path)).samples(2, tokenizer, 0) == [Sample(question, tokens[1], tokens[0])] * 2
    fixed = ShareGPT(Choice(path, oversample=False), 9).samples(5, tokenizer, 0)
    assert fixed == [Sample(question, 9, tokens[0])] * 2
    for wrong in ("{}", "[1]", '[{"conversations": [{"value": 1}]}]', "["):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=r"sharegpt\.json.*expected"):
            ShareGPT(Choice(path)).samples(1, tokenizer, 0)
    path.write_text(json.dumps(entries[1:2]))
    with pytest.raises(ValueError, match="expected a file with prompts that this dataset can use"):
        ShareGPT(Choice(path)).samples(1, tokenizer, 0)


def test_spec_bench_is_filtered_by_category(tmp_path):
    questions = [
        {"question_id": 81, "category": "writing", "turns": ["one", "and then"]},
        {"question_id": 82, "category": "math", "turns": ["two"]},
        {"question_id": 83, "category": "math", "turns": ["three"]},
    ]
    choice = in_order(file(tmp_path, questions))
    assert SpecBench(choice).samples(3, None, 0) == [Sample("one", 256), Sample("two", 256), Sample("three", 256)]
    assert [sample.prompt for sample in SpecBench(choice, 9, "math").samples(2, None, 0)] == ["two", "three"]
    with pytest.raises(ValueError, match="spec_bench_category='rhymes': expected one of math, writing"):
        SpecBench(choice, 9, "rhymes").samples(1, None, 0)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"prompt": 1}', '{"turns": []}', '{"turns": [1]}'])
def test_unusable_files_are_refused(tmp_path, content):
    choice = file(tmp_path, content)
    for dataset in (Custom(choice), SpecBench(choice)):
        with pytest.raises(ValueError, match="expected"):
            dataset.samples(1, None, 0)


def test_missing_file_is_reported(tmp_path):
    with pytest.raises(ValueError, match=r"dataset_path=.*expected a file of text"):
        Custom(Choice(tmp_path / "nowhere")).samples(1, None, 0)
