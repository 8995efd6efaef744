"""What ``load`` refuses, before anything is compiled: settings, folders, sizes and pairs."""

import json
import shutil

import jax
import numpy as np
import pytest
from tiny import tiny_tokenizer
from tiny_folders import SMALL, V

import jspec
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.loading import memory_budget


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"draft": "nowhere"},
            ValueError,
            "draft='nowhere': expected a checkpoint folder, a GGUF file, or the name .*, org/name$",
        ),
        ({"draft": "org/model"}, ValueError, "'org/model' is no folder, and the local hub cache .* --download"),
        (
            {"draft": 3},
            ValueError,
            "draft=3: expected the path of a checkpoint folder or a GGUF file, .*'ngram' or None",
        ),
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
            {"tensor_parallel_size": 16},
            ValueError,
            "tensor_parallel=16: expected at most 8, the number of devices that JAX",
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


def test_a_target_that_is_no_folder_is_refused(folders, tmp_path):
    for name in ("meta/model", "meta-llama/Llama-3.1-8B"):
        with pytest.raises(ValueError, match=f"'{name}' is no folder, .*: expected a checkpoint folder, or --download"):
            jspec.load(name)
    for target, words in (
        (None, "target=None: expected the path of a checkpoint folder"),
        (folders / "target" / "config.json", "config.json' is a file: expected the checkpoint folder that it is in"),
        ("/no/such/folder", "target='/no/such/folder': expected a checkpoint folder, a GGUF file, or the name"),
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


def test_without_tokenizers_vocabularies_must_be_equal(folders):
    with pytest.raises(ValueError, match=f"draft has a vocabulary of 288 and the target of {V}"):
        jspec.load(folders / "ids", folders / "draft", **SMALL)
    assert jspec.load(folders / "ids", folders / "target", **SMALL).method == "draft_model"
