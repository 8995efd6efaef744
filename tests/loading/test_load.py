"""``load``: folders in, and a model that decodes as its checkpoint and the settings say."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import TARGET, causal
from greedy_texts import assert_likeliest
from resaved import set_keys
from tiny import tiny_checkpoint, tiny_tokenizer
from tiny_folders import EOS, SIZES, SMALL, V

import convert
import jspec
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.loading.engine_config import engine_config
from jspec.loading.plan import default_params_of

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
PROMPTS = ["def f(x):\n", "import os", "x"]


@pytest.fixture(scope="module")
def llm(folders):
    return jspec.load(folders / "target", **SMALL)


@pytest.fixture(scope="module")
def plain(llm):
    return [result.token_ids for result in jspec.generate(llm, PROMPTS, **GREEDY)]


def test_plain_decoding_follows_its_own_logits(llm, plain):
    for prompt, tokens in zip(PROMPTS, plain, strict=True):
        assert_likeliest(llm, llm.tokenizer.encode(prompt), tokens)


def test_one_call_from_folders(folders, plain):
    """A draft model with a vocabulary padded differently, named as Hugging Face users would."""
    target, draft = str(folders / "target"), str(folders / "draft")
    results = jspec.generate(target, PROMPTS, draft=draft, num_speculative_tokens=2, verify="block", **SMALL, **GREEDY)
    assert [result.token_ids for result in results] == plain
    assert sum(result.stats.num_draft_tokens for result in results) > 0
    assert len(results[0].stats.acceptance_histogram) == 3
    assert results[0].text is not None


def test_one_call_with_prompt_lookup(folders, plain):
    results = jspec.generate(folders / "target", PROMPTS, draft="ngram", num_draft_tokens=3, **SMALL, **GREEDY)
    assert [result.token_ids for result in results] == plain
    assert len(results[0].stats.acceptance_histogram) == 4


def test_one_call_that_chooses_how_much_to_draft(folders, plain, tmp_path):
    """By costs that it measures itself, and by those again, from a file."""
    speculation = jspec.Speculation("auto", max_draft_tokens=2)
    llm = jspec.load(folders / "target", folders / "draft", speculation=speculation, **SMALL)
    results = jspec.generate(llm, PROMPTS, **GREEDY)
    assert [result.token_ids for result in results] == plain
    assert not any(result.reproducible for result in results)
    llm.costs.write(tmp_path / "costs.json")
    again = jspec.load(
        folders / "target", folders / "draft", speculation=speculation, costs=tmp_path / "costs.json", **SMALL
    )
    assert again.costs == llm.costs


def test_bfloat16_runs(folders):
    model = jspec.load(folders / "target", dtype="bfloat16", **SMALL)
    assert {leaf.dtype for leaf in jax.tree.leaves(model.engine.runner.batch.state.cache)} == {jnp.dtype(jnp.bfloat16)}
    result = jspec.generate(model, "import os", temperature=0.8, max_tokens=9, seed=1, ignore_eos=True)
    assert (len(result.token_ids), result.finish_reason) == (9, "length")
    assert model.logits([5, 6]).dtype == jnp.float32


def test_a_converted_folder_is_the_same_model(folders, llm):
    convert.convert(folders / "target", folders / "converted")
    converted = jspec.load(folders / "converted", **SMALL)
    assert converted.target.config == llm.target.config
    tokens = llm.tokenizer.encode(PROMPTS[0])
    assert converted.tokenizer.encode(PROMPTS[0]) == tokens
    np.testing.assert_array_equal(converted.logits(tokens), llm.logits(tokens))


def test_a_folder_without_tokenizer_works_with_ids(folders, llm, plain):
    bare = jspec.load(folders / "ids", **SMALL)
    assert bare.tokenizer is None
    tokens = llm.tokenizer.encode(PROMPTS[1])
    np.testing.assert_array_equal(bare.logits(tokens), llm.logits(tokens))
    with pytest.raises(ValueError, match="prompt 0 is text, but the checkpoint has no tokenizer; pass token ids"):
        jspec.generate(bare, "text")


@pytest.mark.parametrize("length", [1, 2, 7, 33])
def test_logits_are_those_of_one_causal_pass(llm, length):
    tokens = np.random.default_rng(length).integers(V, size=length)
    logits = llm.logits(tokens)
    assert (logits.shape, logits.dtype) == ((length, V), jnp.float32)
    np.testing.assert_allclose(logits, causal(llm.target)(jnp.asarray(tokens)[None])[0], rtol=1e-5, atol=1e-5)


def test_logits_refuse_what_is_not_token_ids(llm):
    for tokens, words in (
        ([], "token_ids is empty"),
        ([0, V], f"token_ids has token id {V}: expected 0..{V - 1}"),
        ([0.5], "token_ids: expected a flat list of integer token ids"),
        ([1] * 257, "token_ids has 257 tokens: expected at most 256"),
    ):
        with pytest.raises(ValueError, match=words):
            llm.logits(tokens)


def test_load_refuses_with_field_value_and_fix(folders, llm):
    assert (llm.method, llm.engine.runner.num_draft_tokens, llm.engine.runner.width) == (None, 0, 1)
    drafted = jspec.load(folders / "target", folders / "draft", speculation=jspec.Speculation(3), width=6, **SMALL)
    runner = drafted.engine.runner
    assert (drafted.method, runner.num_draft_tokens, runner.width) == ("draft_model", 3, 6)
    assert jspec.load(folders / "target", "ngram", **SMALL).method == "ngram"
    assert jspec.load(folders / "target", max_batch=1).engine.config.max_len == 256  # the positions it has


def test_no_drafts_is_plain_decoding(folders, plain, monkeypatch):
    """The draft, which must be there, is not read; the same by name, in a Speculation and in one call."""
    monkeypatch.setattr(jspec.loading.modules, "build_draft_module", lambda *_: pytest.fail("the draft was read"))
    target, draft = folders / "target", folders / "draft"
    llm = jspec.load(target, draft, num_draft_tokens=0, **SMALL)
    assert (llm.method, llm.engine.runner.num_draft_tokens, llm.speculation) == (None, 0, jspec.Speculation(0))
    results = jspec.generate(llm, PROMPTS, **GREEDY)
    assert [result.token_ids for result in results] == plain
    assert results[0].stats.num_draft_tokens == 0
    assert jspec.load(target, "ngram", speculation=jspec.Speculation(num_draft_tokens=0), **SMALL).method is None
    assert [
        r.token_ids for r in jspec.generate(target, PROMPTS, draft=draft, num_draft_tokens=0, **SMALL, **GREEDY)
    ] == plain
    with pytest.raises(ValueError, match="draft='nowhere': expected a checkpoint folder"):
        jspec.load(target, "nowhere", num_draft_tokens=0)
    with pytest.raises(ValueError, match="costs has no place with num_draft_tokens=0"):
        jspec.load(target, draft, num_draft_tokens=0, costs=jspec.CostTable("x", "ngram", {1: {0: 1.0}}))


def test_fields_of_speculation_are_taken_by_name(folders):
    llm = jspec.load(folders / "target", "ngram", num_speculative_tokens=2, verify="match", **SMALL)
    assert llm.speculation == jspec.Speculation(2, "match")


@pytest.fixture
def suggesting(folders, tmp_path):
    """A copy of the target whose generation_config.json is what the test says."""
    target = shutil.copytree(folders / "target", tmp_path / "suggesting")

    def write(**fields):
        (target / "generation_config.json").write_text(json.dumps(fields))
        return target

    return write


def test_sampling_follows_the_checkpoint(suggesting, llm, tmp_path):
    """Fields by name start from its generation_config.json, in a converted folder too; SamplingParams stand."""
    assert llm.default_sampling_params == jspec.SamplingParams()
    others = {"do_sample": False, "max_new_tokens": 3, "repetition_penalty": 1.0, "min_p": None, "eos_token_id": 1}
    target = suggesting(temperature=0.5, top_k=3, top_p=0.9, **others)
    cool = jspec.load(target, **SMALL)
    assert cool.default_sampling_params == jspec.SamplingParams(temperature=0.5, top_k=3, top_p=0.9)
    some = {"max_tokens": 9, "seed": 1, "ignore_eos": True}

    def tokens(model, *params, **options):
        return jspec.generate(model, "import os", *params, **options).token_ids

    expected = tokens(llm, temperature=0.5, top_k=3, top_p=0.9, **some)
    assert tokens(cool, **some) == expected
    assert tokens(cool, temperature=2.0, **some) == tokens(llm, temperature=2.0, top_k=3, top_p=0.9, **some)
    assert tokens(cool, jspec.SamplingParams(**some)) == tokens(llm, **some) != expected
    assert len(tokens(cool)) <= 16
    convert.convert(target, tmp_path / "converted")
    assert default_params_of(Checkpoint.open(tmp_path / "converted"), "auto") == cool.default_sampling_params
    assert default_params_of(Checkpoint.open(target), "jspec") == jspec.SamplingParams()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": "hot"}, "temperature='hot': expected a number"),
        ({"temperature": 1e39}, r"temperature=1e\+39: expected a number"),
        ({"top_p": 1.5}, "top_p=1.5: expected"),
        ({"top_k": 2.5}, "top_k=2.5: expected"),
        ({"min_p": True}, "min_p=True: expected"),
        ({"repetition_penalty": "1.1"}, "repetition_penalty='1.1': expected a number above 0"),
    ],
)
def test_bad_generation_config_values_name_the_file(suggesting, fields, words):
    with pytest.raises(ValueError, match=rf"suggesting/generation_config\.json: {words}"):
        jspec.load(suggesting(**fields))
    assert default_params_of(Checkpoint.open(suggesting(**fields)), "jspec") == jspec.SamplingParams()


def test_a_penalty_of_the_checkpoint_is_followed(suggesting):
    params = default_params_of(Checkpoint.open(suggesting(repetition_penalty=1.05, top_k=20)), "auto")
    assert (params.repetition_penalty, params.top_k) == (1.05, 20)


def test_a_draft_model_with_recurrent_states(folders, tmp_path):
    """Prompts are cut and cached for its states, whatever the target is. By mask tokens it cannot draft."""
    sizes = {name: size for name, size in SIZES.items() if name != "num_hidden_layers"}
    hybrid = tiny_checkpoint(tmp_path / "hybrid", "Qwen3_5ForCausalLM", **sizes)
    tiny_tokenizer(hybrid)
    for target in (folders / "target", hybrid):
        llm = jspec.load(target, hybrid, **{**SMALL, "prefill_chunk": None, "max_len": 128})
        runner, config = llm.engine.runner, llm.engine.config
        assert (llm.method, config.chunk, config.snapshot_every) == ("draft_model", 64, 1024)
        assert runner.batch.states_bytes > (0 if target == hybrid else runner.batch.page_bytes)
    with pytest.raises(
        ValueError, match="prefill_chunk=16: expected a multiple of 64, for a model with gated delta nets"
    ):
        jspec.load(folders / "target", hybrid, **SMALL | {"prefill_chunk": 16})
    set_keys(hybrid, pard_token=3)
    words = "a Qwen3_5ForCausalLM cannot draft by mask tokens, .* or the same model without pard_token"
    with pytest.raises(ValueError, match=words):
        jspec.load(folders / "target", hybrid, **SMALL | {"prefill_chunk": 64})


def test_end_of_text_comes_from_the_checkpoint(folders, llm):
    """It ends a completion, is part of its tokens and not of its text."""
    assert llm.target.config.eos_token_ids == (EOS,)
    params = jspec.SamplingParams(temperature=50.0, max_tokens=40, min_tokens=0)
    ended = [r for r in jspec.generate(llm, ["x"] * 60, params, key=jax.random.key(0)) if r.finish_reason == "stop"]
    assert ended
    for result in ended:
        assert result.token_ids.index(EOS) == len(result.token_ids) - 1
        assert result.stop_reason is None
        assert "</s>" not in result.text


def test_prefill_batches_are_small_without_a_gpu(monkeypatch):
    """Every size of them is compiled and run before the first request, and on a CPU a larger one is no faster."""

    def largest(**fields) -> int:
        config = engine_config({"max_len": 8192, **fields}, dataclasses.replace(TARGET, max_position=8192), None)
        return config.chunk_buckets[-1] * config.chunk

    fast = {"reproducible": False}
    assert [largest(), largest(**fast), largest(**fast, prefill_tokens=2048)] == [512, 512, 2048]
    assert largest(**fast, prefill_chunk=1024) == 1024
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert largest(**fast) == 4096


def test_trees_are_reproducible_where_that_is_asked_for():
    """Shapes are pinned then, and rounds of few requests, whom trees are for, take as long as those of many."""

    def of(trees: bool, **fields) -> bool:
        return engine_config(fields, TARGET, None, trees=trees).reproducible

    assert (of(False), of(True), of(True, reproducible=True), of(False, reproducible=False)) == (
        True,
        False,
        True,
        False,
    )
    assert of(True, reproducible=None) is False
