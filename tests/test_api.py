"""``generate``: what goes in, in which forms, with which keys, and what comes back in which order."""

import inspect
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import EOS, MAX_LEN, Letters, V, bigram, successor_table, table_llm

import jspec
from jspec import Result, SamplingParams
from jspec.sampling.requested import ENGINE_FIELDS, LOAD_ARGUMENTS, SAMPLING_FIELDS, SPECULATION_FIELDS

SAMPLED = SamplingParams(temperature=1.0, max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(V, V))
    draft = table + 0.5 * rng.normal(size=(V, V))
    return table_llm(bigram(table, eos_token_ids=(EOS,)), bigram(draft), Letters())


@pytest.fixture(scope="module")
def letters():
    """Greedy text is the alphabet."""
    return table_llm(bigram(successor_table(), eos_token_ids=(EOS,)), tokenizer=Letters())


def one(llm, prompt, *args, **kwargs) -> Result:
    result = jspec.generate(llm, prompt, *args, **kwargs)
    assert isinstance(result, Result)
    return result


def many(llm, prompts, *args, **kwargs) -> list[Result]:
    results = jspec.generate(llm, prompts, *args, **kwargs)
    assert isinstance(results, list)
    return results


def ids(results) -> list[list[int]]:
    return [result.token_ids for result in results]


@pytest.mark.parametrize(
    "prompt",
    [
        "abc",
        [0, 1, 2],
        (0, 1, 2),
        range(3),
        iter([0, 1, 2]),
        np.array([0, 1, 2]),
        np.array([0, 1, 2], np.uint16),
        jnp.array([0, 1, 2]),
        {"prompt": "abc"},
        {"prompt_token_ids": [0, 1, 2]},
        {"prompt": "not looked at", "prompt_token_ids": jnp.array([0, 1, 2])},
    ],
)
def test_one_prompt_gives_one_result(letters, prompt):
    result = one(letters, prompt, temperature=0, max_tokens=3)
    assert (result.text, result.token_ids, result.prompt_token_ids) == ("def", [3, 4, 5], [0, 1, 2])
    assert all(type(token) is int for token in result.token_ids + result.prompt_token_ids)


@pytest.mark.parametrize(
    "prompts",
    [
        ["abc", [7]],
        ("abc", "h"),
        [np.array([0, 1, 2]), [np.int64(7)]],
        [jnp.array([0, 1, 2]), range(7, 8)],
        [{"prompt": "abc"}, {"prompt_token_ids": [7]}],
        np.array(["abc", "h"]),
        np.array([[1, 2], [6, 7]]),
        jnp.array([[1, 2], [6, 7]]),
        (prompt for prompt in ("abc", "h")),
        {"a": "abc", "b": "h"}.values(),
    ],
    ids=[
        "lists",
        "tuple",
        "numpy",
        "jax",
        "dictionaries",
        "text array",
        "id array",
        "jax id array",
        "generator",
        "values",
    ],
)
def test_several_prompts_give_a_list(letters, prompts):
    results = many(letters, prompts, temperature=0, max_tokens=2)
    assert [result.text for result in results] == ["de", "ij"]


def test_a_list_of_one_and_a_list_of_none(letters):
    assert [result.text for result in many(letters, ["a"], temperature=0, max_tokens=1)] == ["b"]
    assert many(letters, []) == []
    assert many(letters, [], key=jax.random.key(0)) == []
    assert many(letters, iter([])) == many(letters, ()) == []


def test_results_are_in_the_order_of_the_prompts(letters):
    """More of them than rows, the first ones the longest."""
    params = [SamplingParams(temperature=0, max_tokens=30 - 3 * i, ignore_eos=True) for i in range(9)]
    results = many(letters, [[i] for i in range(9)], params)
    assert ids(results) == [[(i + 1 + j) % V for j in range(30 - 3 * i)] for i in range(9)]


def test_without_a_tokenizer_there_is_no_text():
    result = one(table_llm(bigram(successor_table())), [3], temperature=0, max_tokens=4)
    assert (result.text, result.token_ids) == (None, [4, 5, 6, 7])


def test_settings_as_an_object_or_as_words(llm):
    expected = one(llm, "abc", SamplingParams(temperature=0.9, top_k=7, max_tokens=8, seed=5)).token_ids
    assert one(llm, "abc", temperature=0.9, top_k=7, max_tokens=8, seed=5).token_ids == expected
    assert one(llm, "abc", temperature=0.9, top_k=7, max_new_tokens=8, seed=5).token_ids == expected
    params = SamplingParams(temperature=0.9, top_k=7, max_tokens=8, seed=5)
    assert one(llm, "abc", sampling_params=params).token_ids == expected  # as in vLLM


def test_a_model_generates_what_the_functions_do(llm):
    params = SamplingParams(temperature=0.9, max_tokens=8, seed=5)
    prompts = ["abc", "b"]
    assert ids(llm.generate(prompts, params)) == ids(many(llm, prompts, params))
    assert llm.generate("abc", sampling_params=params).token_ids == one(llm, "abc", params).token_ids
    for streamed in (llm.stream("abc", params), jspec.stream(llm, "abc", params)):
        assert [token for delta in streamed for token in delta.token_ids] == one(llm, "abc", params).token_ids


def test_arguments_of_load_are_declared_once():
    arguments = inspect.signature(jspec.load).parameters
    assert {"target", *LOAD_ARGUMENTS, "options"} == set(arguments)
    assert not {*SPECULATION_FIELDS, *ENGINE_FIELDS, *SAMPLING_FIELDS} & set(arguments)


def test_a_model_says_what_it_is(llm):
    said = repr(llm)
    for words in ("LlamaForCausalLM", "draft='draft_model'", "num_draft_tokens=4", "verify='rejection'", "float32"):
        assert words in said
    assert "1 x 'cpu'" in said
    assert "pages=18 of 7 tokens" in said


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"params": SAMPLED, "temperature": 1.0}, TypeError, "temperature: give either params or its fields"),
        ({"max_tokens": 3, "max_new_tokens": 3}, TypeError, "are the same argument; give one of them"),
        ({"temprature": 1.0}, TypeError, "has no argument 'temprature'; did you mean 'temperature'"),
        ({"top_k": -5}, ValueError, "top_k=-5: expected an integer of at least 1"),
        ({"logprobs_mode": "raw"}, ValueError, "logprobs_mode='raw': expected None or one of 'raw_logprobs', 'proc"),
        ({"draft": "ngram"}, TypeError, "has no argument 'draft'"),
        ({"params": [SAMPLED]}, ValueError, "params has 1 entries: expected one, or one per prompt, 2"),
        ({"params": [SAMPLED, {"temperature": 0}]}, ValueError, "params={'temperature': 0}: expected SamplingParams"),
        ({"params": {"top_k": 3}}, ValueError, r"params={'top_k': 3}: expected .*: SamplingParams\(\*\*{'top_k': 3}\)"),
        ({"params": 3}, ValueError, "params=3: expected SamplingParams"),
        ({"params": "greedy"}, ValueError, "params='greedy': expected SamplingParams"),
        ({"draft": "ngram"}, TypeError, r"'draft': it is chosen when a model is loaded: give it to jspec.load\(\)"),
        ({"num_speculative_tokens": 2}, TypeError, r"give it to jspec.load\(\)"),
        ({"params": SAMPLED, "sampling_params": SAMPLED}, TypeError, "'sampling_params' and 'params' are the same"),
        ({"max_length": 9}, TypeError, "max_tokens counts new tokens only"),
        ({"stop_token_ids": [V]}, ValueError, f"stop_token_ids has token id {V}: expected 0..{V - 1}"),
        ({"key": "0"}, ValueError, "key='0': expected a JAX key"),
        ({"key": np.zeros(2)}, ValueError, "key=array.*: expected a JAX key"),
        ({"key": np.zeros(3, np.uint32)}, ValueError, "key=array.*: expected a JAX key"),
        ({"key": 0}, ValueError, "key=0: expected a JAX key"),
        ({"key": jax.random.key(0), "seed": 1}, ValueError, "key and SamplingParams.seed are both given"),
        ({"key": jax.random.key(0, impl="rbg")}, ValueError, "key has implementation rbg: expected .*threefry2x32"),
        ({"key": jax.random.split(jax.random.key(0), 3)}, ValueError, r"shape \(3,\): expected .*\(2,\)"),
        ({"key": jax.random.split(jax.random.key(0), (1, 2))}, ValueError, r"shape \(1, 2\): expected .*\(2,\)"),
    ],
)
def test_refused_options(llm, options, error, words):
    with pytest.raises(error, match=words):
        jspec.generate(llm, ["abc", "d"], **options)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ("", "prompt 0 is empty: expected at least one token"),
        (["a", []], "prompt 1 is empty"),
        ([[1] * MAX_LEN], "prompt 0 has 40 tokens, but max_len=40 leaves room for 39"),
        (["a", [1, V]], f"prompt 1 has token id {V}: expected 0..{V - 1}"),
        ([-1], "prompt 0 has token id -1: expected 0..28"),
        ([1.0, 2.0], "prompt 0: expected a string or a flat list of integer token ids"),
        ([True, False], "prompt 0: expected a string or a flat list"),
        (["a", 3], "prompt 1: expected a string or a flat list"),
        (["a", None], "prompt 1: expected a string or a flat list"),
        ([[[1, 2]]], "prompt 0: expected a string or a flat list"),
        ([[[1], [1, 2]]], "prompt 0: expected a string or a flat list"),
        ([1, "a"], "prompt 0: expected a string or a flat list"),
        ([[2**70]], f"prompt 0 has token id {2**70}: expected 0..{V - 1}"),
        ([-(2**70), 1], f"prompt 0 has token id -{2**70}"),
        (None, "prompts=None: expected text, token ids, "),
        (7, "prompts=7: expected text, token ids, "),
        (np.array(7), r"prompts=array\(7\): expected text"),
        (b"abc", "prompts is bytes; decode them first"),
        ({"abc", "d"}, "prompts is a set, which has no order"),
        ({"text": "abc"}, r"prompt 0 is a dictionary with 'text': expected text, .*{'prompt_token_ids': ids}"),
        (["a", {"prompt": 3}], "prompt 1 is a dictionary with prompt=3: expected"),
        (["a", {}], "prompt 1 is a dictionary with prompt=None: expected"),
        ([{"prompt_token_ids": "abc"}], "prompt 0 is a dictionary with prompt_token_ids='abc': expected"),
        ([{"prompt_token_ids": [V]}], f"prompt 0 has token id {V}"),
        ([{"role": "user", "content": "a"}], "prompt 0 is a chat message"),
        ({"input_ids": [1], "attention_mask": [1]}, r"prompt 0 is what a tokenizer returns; give its \['input_ids'\]"),
    ],
)
def test_refused_prompts(llm, prompts, words):
    """Before anything runs, and the model stays usable."""
    with pytest.raises(ValueError, match=words):
        jspec.generate(llm, prompts, SAMPLED)
    assert len(one(llm, "a", SAMPLED).token_ids) == 9


@pytest.mark.parametrize("most", [None, 2**31, 10**30])
def test_to_the_end_of_the_context(letters, most):
    result = one(letters, "abc", temperature=0, max_tokens=most, ignore_eos=True)
    assert (len(result.token_ids), result.finish_reason) == (MAX_LEN - 3, "length")


def test_numbers_at_the_edge_run(llm):
    """The largest that are taken: no token is forbidden, none is forced."""
    edge = SamplingParams(temperature=1e30, top_k=2**31 - 1, max_tokens=None, min_tokens=2**22)
    assert one(llm, "abc", edge).finish_reason == "length"
    assert one(llm, "abc", top_p=2.0**-126, temperature=1.0, seed=1).finish_reason in ("stop", "length")


def test_a_seed_is_the_key_it_means(llm):
    prompts = ["abc", "d", "xyz"]
    seeded = many(llm, prompts, [SamplingParams(max_tokens=9, ignore_eos=True, seed=s) for s in (0, 7, 2**32 - 1)])
    keys = jnp.stack([jax.random.key(0), jax.random.key(7), jax.random.key(2**32 - 1)])
    assert ids(many(llm, prompts, SAMPLED, key=keys)) == ids(seeded)
    assert len(set(map(tuple, ids(seeded)))) == 3


def test_a_seed_means_the_same_everywhere_in_the_list(llm):
    params = SamplingParams(max_tokens=9, ignore_eos=True, seed=3)
    same = many(llm, ["abc", "d", "abc", "abc"], params)
    assert same[0].token_ids == same[2].token_ids == same[3].token_ids == one(llm, "abc", params).token_ids


def test_all_63_bits_of_a_seed_count(llm):
    texts = [one(llm, "a", max_tokens=20, ignore_eos=True, seed=s).token_ids for s in (1, 2**32 + 1, 2**62 + 1)]
    assert len(set(map(tuple, texts))) == 3


def test_one_key_serves_all_prompts(llm):
    key = jax.random.key(11)
    results = many(llm, ["abc", "abc", "abc"], SAMPLED, key=key)
    assert len(set(map(tuple, ids(results)))) == 3
    folded = jnp.stack([jax.random.fold_in(key, i) for i in range(3)])
    assert ids(many(llm, ["abc"] * 3, SAMPLED, key=folded)) == ids(results)
    assert one(llm, "abc", SAMPLED, key=key).token_ids == results[0].token_ids


def test_legacy_keys(llm):
    old = jax.random.PRNGKey(4)
    assert old.dtype == jnp.uint32
    expected = ids(many(llm, ["a", "b"], SAMPLED, key=jax.random.key(4)))
    assert ids(many(llm, ["a", "b"], SAMPLED, key=old)) == expected
    pair = jnp.stack([old, jax.random.PRNGKey(5)])
    apart = many(llm, ["a", "b"], [SamplingParams(max_tokens=9, ignore_eos=True, seed=s) for s in (4, 5)])
    assert ids(many(llm, ["a", "b"], SAMPLED, key=pair)) == ids(apart)


def test_without_seed_or_key_every_call_differs(llm):
    texts = {tuple(one(llm, "a", temperature=1.0, max_tokens=20, ignore_eos=True).token_ids) for _ in range(3)}
    assert len(texts) == 3


def test_silent_off_a_terminal(llm, capfd, monkeypatch):
    one(llm, "a", SAMPLED)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    many(llm, ["a", "b"], SAMPLED)
    assert "0/2" in capfd.readouterr().err


def test_an_interruption_leaves_the_model_usable(letters, monkeypatch):
    """Also while a traceback keeps the frames of the interrupted call alive."""
    expected = ids(many(letters, ["a", "b", "c", "d"], temperature=0, max_tokens=5))

    class Interrupted(jspec.llm.tqdm):
        def update(self, n=1):
            raise KeyboardInterrupt

    params = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 30, 30, 30)]
    with monkeypatch.context() as patch:
        patch.setattr(jspec.llm, "tqdm", Interrupted)
        with pytest.raises(KeyboardInterrupt) as interruption:
            jspec.generate(letters, ["a", "b", "c", "d"], params)
    assert ids(many(letters, ["a", "b", "c", "d"], temperature=0, max_tokens=5)) == expected
    assert interruption.tb is not None
