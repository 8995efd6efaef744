"""``load``: folders in, and which pairs, sizes and settings are refused before anything is compiled."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import TARGET, causal
from tiny import tiny_checkpoint, tiny_tokenizer

import convert
import jspec
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.loading import memory_budget
from jspec.loading.engine_config import engine_config
from jspec.loading.plan import default_params_of

V, EOS = 264, 1  # six ids more than the tokenizer has
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "head_dim": 8,
    "bos_token_id": 0,
    "eos_token_id": EOS,
}
SMALL = {"max_batch": 2, "max_len": 48, "page_size": 16, "prefill_chunk": 16}
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
PROMPTS = ["def f(x):\n", "import os", "x"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """target and draft, which is the target rounded to bfloat16 and padded to another vocabulary."""
    root = tmp_path_factory.mktemp("checkpoints")
    target = tiny_checkpoint(root / "target", **SIZES)
    draft = tiny_checkpoint(root / "draft", seed=0, dtype="bfloat16", **SIZES | {"vocab_size": 288})
    for folder in (target, draft):
        tiny_tokenizer(folder)
    shutil.copytree(target, root / "ids")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (root / "ids" / name).unlink()
    return root


@pytest.fixture(scope="module")
def llm(folders):
    return jspec.load(folders / "target", **SMALL)


@pytest.fixture(scope="module")
def plain(llm):
    return [result.token_ids for result in jspec.generate(llm, PROMPTS, **GREEDY)]


def test_plain_decoding_follows_its_own_logits(llm, plain):
    for prompt, tokens in zip(PROMPTS, plain, strict=True):
        text = [*llm.tokenizer.encode(prompt), *tokens]
        likeliest = np.argmax(llm.logits(text), axis=-1).tolist()
        assert likeliest[-len(tokens) - 1 : -1] == tokens


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


def test_costs_of_another_method_are_refused(folders):
    device = jax.devices()[0].device_kind
    table = jspec.CostTable(device, "ngram", {1: {0: 1.0, 8: 2.0}, 2: {0: 1.0, 8: 2.0}})
    auto = {"speculation": jspec.Speculation("auto"), **SMALL}
    llm = jspec.load(folders / "target", "ngram", costs=table, **auto)
    assert llm.costs.rounds == {2: {0: 1.0, 1: 1.125, 2: 1.25, 3: 1.375, 4: 1.5, 6: 1.75, 8: 2.0}}
    with pytest.warns(UserWarning, match=f"costs were measured on 'another', and this is '{device}'"):
        jspec.load(folders / "target", "ngram", costs=jspec.CostTable("another", "ngram", table.rounds), **auto)
    for draft, options, words in (
        (folders / "draft", auto, "costs has method='ngram', but the draft is a 'draft_model'"),
        (None, auto, "costs has no place with draft=None"),
        ("ngram", SMALL, "costs has no place with num_draft_tokens=4"),
        ("ngram", auto | {"max_batch": 3}, "costs has batches 1..2: expected max_batch=3 among them"),
        ("ngram", auto | {"costs": "nowhere"}, "costs='nowhere': expected the path of a JSON file"),
    ):
        with pytest.raises(ValueError, match=words):
            jspec.load(folders / "target", draft, **({"costs": table} | options))


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


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"draft": "nowhere"}, ValueError, "draft='nowhere': expected a checkpoint folder, or the name .*, org/name$"),
        ({"draft": "org/model"}, ValueError, "'org/model' is no folder, and the local hub cache .* --download"),
        ({"draft": 3}, ValueError, "draft=3: expected the path of a checkpoint folder, 'mtp', 'ngram' or None"),
        ({"costs": 3}, ValueError, "costs=3: expected None, a CostTable, or the path of one"),
        ({"speculation": 3}, TypeError, r"speculation=3: .* jspec.Speculation\(num_draft_tokens=3\)"),
        ({"engine": 3}, TypeError, r"engine=3: .* jspec.EngineConfig\(max_batch=3\)"),
        ({"engine": jspec.EngineConfig(), "max_batch": 3}, TypeError, "max_batch: give either engine or its fields"),
        ({"verify": True}, ValueError, "verify=True: expected a rule, .* files are hashed with check_files=True"),
        ({"speculation": {"verify": "match"}}, TypeError, r"as in jspec.Speculation\(\*\*{'verify': 'match'}\)"),
        ({"generation_config": "vllm"}, ValueError, "generation_config='vllm': expected 'auto', .* or 'jspec'"),
        ({"generation_config": None}, ValueError, "generation_config=None: expected 'auto'"),
        ({"page_size": "64"}, ValueError, "page_size='64': expected"),
        ({"num_pages": 0}, ValueError, "num_pages=0: expected"),
        ({"prefill_chunk": 2.0}, ValueError, "prefill_chunk=2.0: expected"),
        ({"rounds": 2**31}, ValueError, f"rounds={2**31}: expected"),
        ({"dtype": ""}, ValueError, "dtype='': expected 'float32' or 'bfloat16'"),
        ({"dtype": np.float32}, ValueError, "dtype=.*float32.*: expected 'float32' or 'bfloat16'"),
        ({"max_model_len": 9}, TypeError, "no argument 'max_model_len': it is max_len of jspec.load"),
        ({"speculative_model": "x"}, TypeError, "no argument 'speculative_model': it is draft of jspec.load"),
        ({"speculative_config": {}}, TypeError, "its model is draft of jspec.load"),
        ({"assistant_model": "x"}, TypeError, "no argument 'assistant_model': it is draft of jspec.load"),
        (
            {"tensor_parallel_size": 8},
            ValueError,
            "tensor_parallel=8: expected at most 4, the number of devices that JAX",
        ),
        ({"tensor_parallel": 3}, ValueError, "tensor_parallel=3: expected a divisor of num_heads, 4"),
        ({"tensor_parallel": 0}, ValueError, "tensor_parallel=0: expected an integer of at least 1"),
        ({"tensor_parallel": "2"}, ValueError, "tensor_parallel='2': expected an integer of at least 1"),
        ({"tensor_parallel": 2, "tensor_parallel_size": 2}, TypeError, "are the same argument; give one of them"),
        ({"draft_tensor_parallel": 2}, ValueError, "draft_tensor_parallel=2: expected 1 or tensor_parallel, 1"),
        ({"pipeline_parallel_size": 2}, TypeError, "an engine runs on the GPUs of tensor_parallel"),
        (
            {"gpu_memory_utilization": 0},
            ValueError,
            "gpu_memory_utilization=0: expected a number above 0 and at most 1",
        ),
        ({"reproducible": "yes"}, ValueError, "reproducible='yes': expected True, False or None"),
        ({"swap_space": -1}, ValueError, "swap_space=-1: expected a number of GiB, at least 0"),
        ({"read_ahead": -1}, ValueError, "read_ahead=-1: expected None or an integer in 0.."),
        ({"max_num_batched_tokens": 99}, TypeError, "it is prefill_tokens of jspec.load()"),
        ({"max_len": 257}, ValueError, "max_len=257: expected at most 256, the positions the target has"),
        ({"max_len": 1.5}, ValueError, "max_len=1.5: expected an integer"),
        ({"max_batch": 0}, ValueError, "max_batch=0: expected"),
        ({"dtype": "float16"}, ValueError, "dtype='float16': expected 'float32' or 'bfloat16'"),
        ({"draft": "ngram", "width": 4}, ValueError, "width=4: expected at least num_draft_tokens \\+ 1, which is 5"),
        ({"draft": "ngram", "num_draft_tokens": "auto", "width": 8}, ValueError, "width=8: expected .*, which is 9"),
        ({"draft": "ngram", "verify": "rejecton"}, ValueError, "verify='rejecton': expected one of match, rejection"),
        ({"lookup": True}, ValueError, "lookup=True: expected draft= beside it, a draft head or a draft model"),
        ({"lookup": True, "draft": "ngram"}, ValueError, "lookup=True has no place with the drafting method 'ngram'"),
        ({"lookup": True, "num_draft_tokens": 0}, ValueError, "lookup=True: expected False with num_draft_tokens=0"),
        ({"lookup": "yes", "draft": "ngram"}, ValueError, "lookup='yes': expected True or False"),
        ({"draft": np.array(["a", "b"])}, ValueError, "draft=array.*: expected the path of a checkpoint folder"),
        ({"aux_convention": np.array(["a", "b"])}, ValueError, "aux_convention=array.*: expected None or one of"),
        ({"norm_output": np.array(["a", "b"])}, ValueError, "norm_output=array.*: expected None or one of"),
        ({"mask_first": np.array([1, 0])}, ValueError, "mask_first=array.*: expected None, True or False"),
        ({"verify": np.array(["a", "b"])}, ValueError, "verify=array.*: expected one of"),
        ({"draft_sampling": np.array(["a", "b"])}, ValueError, "draft_sampling=array.*: expected one of"),
        ({"logprobs_mode": np.array(["a", "b"])}, ValueError, "logprobs_mode=array.*: expected one of"),
        ({"compilation_cache": None}, ValueError, "compilation_cache=None: expected True, False or the path"),
        ({"drafter": "ngram"}, TypeError, "has no argument 'drafter'; did you mean 'draft'"),
        ({"num_draft_tokens": 3, "num_speculative_tokens": 3}, TypeError, "are the same argument"),
        ({"verify": "match", "speculation": jspec.Speculation()}, TypeError, "give either speculation or its fields"),
    ],
)
def test_refused_settings(folders, options, error, words):
    with pytest.raises(error, match=words):
        jspec.generate(folders / "target", "x", **options)
    if "drafter" not in options:  # which generate() has no likelier meaning for either
        with pytest.raises(error, match=words):
            jspec.load(folders / "target", **options)


def test_generate_checks_arguments_before_loading(folders, monkeypatch):
    monkeypatch.setattr(jspec.api, "open_pair", lambda *_: pytest.fail("opened"))
    for prompts, options, words in (
        (None, {}, "prompts=None"),
        ([[0.5]], {}, "prompt 0: expected a string or a flat list"),
        ([{"text": "x"}], {}, "prompt 0 is a dictionary with 'text'"),
        ("x", {"top_p": 2}, "top_p=2"),
        ("x", {"num_draft_tokens": 256}, "num_draft_tokens=256"),
        ("x", {"key": 0}, "key=0"),
        (["x", "y"], {"params": [jspec.SamplingParams()]}, "params has 1 entries"),
    ):
        with pytest.raises(ValueError, match=words):
            jspec.generate(folders / "target", prompts, **options)


def test_a_field_of_a_request_is_no_argument_of_load(folders):
    with pytest.raises(TypeError, match=r"'max_new_tokens': it belongs to a request: give it to LLM.generate\(\)"):
        jspec.load(folders / "target", max_new_tokens=3)
    with pytest.raises(TypeError, match="has no argument 'max_btach'; did you mean 'max_batch'"):
        jspec.load(folders / "target", max_btach=3)


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


def test_a_target_that_is_no_folder_is_refused(folders, tmp_path):
    for name in ("meta/model", "meta-llama/Llama-3.1-8B"):
        with pytest.raises(ValueError, match=f"'{name}' is no folder, .*: expected a checkpoint folder, or --download"):
            jspec.load(name)
    for target, words in (
        (None, "target=None: expected the path of a checkpoint folder"),
        (folders / "target" / "config.json", "config.json' is a file: expected the checkpoint folder that it is in"),
        ("/no/such/folder", "target='/no/such/folder': expected a checkpoint folder, or the name"),
    ):
        with pytest.raises(ValueError, match=words):
            jspec.load(target)
    with pytest.raises(ValueError, match=r"config\.json"):
        jspec.load(tmp_path)


def test_a_batch_that_does_not_fit_is_refused_before_loading(folders, monkeypatch):
    """Refused with numbers from the configs alone: no weights are read, nothing is compiled."""
    monkeypatch.setattr(Checkpoint, "params", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(
        MemoryError, match=r"needs .* GiB .* max_batch=30000000 x max_len=256\), but .* are free; lower"
    ):
        jspec.load(folders / "target", max_batch=30_000_000)
    monkeypatch.setattr(memory_budget, "free_bytes", lambda: 2**16)
    with pytest.raises(MemoryError, match="lower max_batch, max_len or num_pages"):
        jspec.load(folders / "target", folders / "draft", **SMALL)


def test_a_draft_with_another_tokenizer_is_refused(folders, tmp_path):
    other = shutil.copytree(folders / "draft", tmp_path / "other")
    tiny_tokenizer(other, first="<other>")
    with pytest.raises(ValueError, match=r"draft's tokenizer differs .* token '<s>' is 0 for the target and None"):
        jspec.load(folders / "target", other, **SMALL)
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    vocabulary["model"]["vocab"] |= {"A": 40, "B": 39}  # two tokens change places
    tiny_tokenizer(other)
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(ValueError, match="draft's tokenizer differs from the target's"):
        jspec.load(folders / "target", other, **SMALL)


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
    config = json.loads((hybrid / "config.json").read_text())
    (hybrid / "config.json").write_text(json.dumps(config | {"pard_token": 3}))
    words = "a Qwen3_5ForCausalLM cannot draft by mask tokens, .* or the same model without pard_token"
    with pytest.raises(ValueError, match=words):
        jspec.load(folders / "target", hybrid, **SMALL | {"prefill_chunk": 64})


def test_without_tokenizers_vocabularies_must_be_equal(folders):
    with pytest.raises(ValueError, match=f"draft has a vocabulary of 288 and the target of {V}"):
        jspec.load(folders / "ids", folders / "draft", **SMALL)
    assert jspec.load(folders / "ids", folders / "target", **SMALL).method == "draft_model"


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
