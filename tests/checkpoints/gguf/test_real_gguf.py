"""Real GGUF files, those of ``JSPEC_GGUF_FILES``: texts of jspec beside those of transformers, and drafts of a real pair.

They are in no tier, because no such file is part of the project. With the folder, which has to hold
``qwen2.5-coder-1.5b-instruct.gguf`` and ``qwen2.5-coder-0.5b-instruct.gguf``, they take minutes."""

import os
from pathlib import Path

import numpy as np
import pytest

import jspec
from jspec.checkpoints.checkpoint import Checkpoint

FILES = os.environ.get("JSPEC_GGUF_FILES")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(FILES is None, reason="JSPEC_GGUF_FILES names no folder with real GGUF files"),
]
TARGET, DRAFT = (Path(FILES or "", f"qwen2.5-coder-{size}b-instruct.gguf") for size in ("1.5", "0.5"))
ASKED = (
    "Write a Python function that reverses a linked list.",
    "What does the keyword `yield` do in Python?",
    "Sort a list of tuples by their second element.",
    "Explain what a hash table is in two sentences.",
    "Write a SQL query that counts users by country.",
    "How do I read a file line by line in Rust?",
    "Write a regular expression that matches an e-mail address.",
    "What is the difference between a process and a thread?",
    "Implement binary search in C.",
    "Write a bash one-liner that counts the lines of all .py files.",
    "What is a closure in JavaScript? Give an example.",
    "Write a unit test for a function that adds two numbers.",
    "Convert 255 to binary and to hexadecimal.",
    "Write a Go function that merges two sorted slices.",
    "Why is quicksort O(n log n) on average?",
    "Write a Dockerfile for a Flask app.",
    "What does HTTP status 409 mean?",
    "Schreibe eine Funktion, die prüft, ob ein Wort ein Palindrom ist.",
    "用 Python 写一个斐波那契函数。",
    "Write a haiku about compilers.",
)
TOKENS = 64


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Checkpoint.open(TARGET).tokenizer
    chats = [[{"role": "user", "content": text}] for text in ASKED]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)["input_ids"] for chat in chats
    ]


@pytest.fixture(scope="module")
def of_transformers(prompts) -> list[list[int]]:
    """The greedy texts of transformers in float32, of the weights that gguf dequantises."""
    import gguf
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    fields = {key: value for key, value in Checkpoint.open(TARGET).fields.raw.items() if value is not None}
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**fields))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, fields["num_hidden_layers"])
    called = {names.get_name(name, (".weight", ".bias")): name for name in model.state_dict()}
    weights = {
        called[tensor.name]: torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32))
        for tensor in gguf.GGUFReader(TARGET, "r").tensors
    }
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    texts = []
    for prompt in prompts:
        with torch.inference_mode():
            made = model.generate(
                torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=[151645, 151643]
            )
        texts.append(made[0, len(prompt) :].tolist())
    return texts


def greedy(prompts, **how) -> tuple[list[list[int]], float]:
    """The texts of jspec, and the mean number of accepted drafts in a round."""
    llm = jspec.load(TARGET, dtype="float32", max_len=256, max_batch=len(prompts), **how)
    results = llm.generate(prompts, jspec.SamplingParams(temperature=0.0, max_tokens=TOKENS))
    accepted = sum(result.stats.num_accepted_draft_tokens for result in results)
    return [result.token_ids for result in results], accepted / sum(result.stats.num_steps for result in results)


def test_texts_are_those_of_transformers(prompts, of_transformers):
    texts, _ = greedy(prompts)
    assert texts == of_transformers


def test_texts_with_drafts_of_the_smaller_model_are_the_same(prompts, of_transformers):
    texts, accepted = greedy(prompts, draft=DRAFT, num_draft_tokens=3)
    assert texts == of_transformers
    assert accepted > 0.5
