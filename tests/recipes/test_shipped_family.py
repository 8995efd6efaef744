"""The checkpoints that come with jspec: small, readable by others, and worth drafting with."""

import numpy as np
import pytest

import jspec
from jspec.checkpoints.tokenizer import load_tokenizer
from jspec.commands.demo import FAMILY
from jspec.outputs import total_stats

PROMPTS = [
    "import os\nimport sys\n\n\ndef main(argv=None):\n",
    "class Queue:\n    def __init__(self, maxsize=0):\n",
    'def read_config(path):\n    """Return the configuration',
    "    try:\n        value = int(text)\n    except ValueError:\n",
]
GREEDY = jspec.SamplingParams(temperature=0, max_tokens=48)
K = 4
FOLDERS = {name: FAMILY / name for name in ("target", "draft")}


# Heads, and an acceptance length that each of them clears on PROMPTS when it drafts greedily.
HEADS = {"eagle": 1.9, "eagle3": 2.2, "parallel": 1.8, "mlp": 1.4, "dspark": 1.6}


def completed(draft, drafts: int = K) -> list[jspec.Result]:
    """One width whatever drafts, so that all of them round alike."""
    settings = jspec.Speculation(num_draft_tokens=drafts)
    llm = jspec.load(
        FOLDERS["target"], draft, speculation=settings, dtype="float32", max_batch=4, max_len=96, width=K + 1
    )
    results = jspec.generate(llm, PROMPTS, GREEDY)
    assert isinstance(results, list)
    return results


@pytest.fixture(scope="module")
def drafted():
    return completed(FOLDERS["draft"])


def test_together_under_forty_megabytes():
    sizes = {path: path.stat().st_size for path in FAMILY.rglob("*") if path.is_file()}
    assert {path.parent.name for path in sizes if path.suffix == ".safetensors"} == {*FOLDERS, *HEADS}
    assert 30e6 < sum(sizes.values()) <= 40e6


def test_one_small_tokenizer_that_keeps_any_text():
    tokenizers = [load_tokenizer(folder) for folder in FOLDERS.values()]
    first, second = (tokenizer.get_vocab() for tokenizer in tokenizers)
    assert first == second
    assert len(first) <= 2048
    text = "class Café:\n    def f(self):\n\treturn '€' * 3  \n\n"
    assert tokenizers[0].decode(tokenizers[0].encode(text), skip_special_tokens=True) == text


def test_acceptance_length_of_two_or_more(drafted):
    total = total_stats(result.stats for result in drafted)
    assert total.num_steps > 20
    assert total.mean_acceptance_length >= 2


def test_text_looks_like_python(drafted):
    text = "".join(result.text for result in drafted)
    assert sum(word in text for word in ("\nimport ", "return ", "raise ", "def ", "try:\n", "\n#", '"""\n')) >= 4


@pytest.mark.parametrize("name", HEADS)
def test_every_head_is_accepted_and_changes_nothing(drafted, name):
    results = completed(FAMILY / name)
    assert [result.token_ids for result in results] == [result.token_ids for result in drafted]
    total = total_stats(result.stats for result in results)
    assert total.mean_acceptance_length >= HEADS[name]


@pytest.mark.parametrize("name", ["eagle3", "parallel"])
def test_heads_that_name_their_target_bring_it(name):
    llm = jspec.load(FAMILY / name, max_batch=1, max_len=32)
    assert (llm.method, llm.target.config.num_layers) == (name, 6)


@pytest.mark.parametrize("draft", ["ngram", None])
def test_the_text_does_not_depend_on_the_draft(drafted, draft):
    results = completed(draft)
    assert [result.text for result in results] == [result.text for result in drafted]
    assert [result.token_ids for result in results] == [result.token_ids for result in drafted]


@pytest.mark.parametrize("name", FOLDERS)
def test_transformers_computes_the_same_logits(name):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    llm = jspec.load(FOLDERS[name], dtype="float32", max_batch=1, max_len=128)
    assert llm.tokenizer is not None
    tokens = llm.tokenizer.encode("".join(PROMPTS))
    reference = AutoModelForCausalLM.from_pretrained(FOLDERS[name], dtype=torch.float32)
    with torch.no_grad():
        theirs = reference(torch.tensor([tokens])).logits[0].numpy()
    ours = np.asarray(llm.logits(tokens))
    assert np.max(np.abs(ours - theirs)) <= 2e-5 * np.max(np.abs(theirs))
