"""What earlier releases wrote is read unchanged: converted folders of each format, and a training run.

tests/golden/last_release.tar.xz holds what commit ac52902a wrote: ``converted/``, tiny folders that ``jspec-convert``
made; ``digests.json``, the dtype and SHA-256 of each of their parameters as it read them then; and ``trained/``, a run of
``jspec train`` of two steps with the ``target`` and the tokens that it was given."""

import hashlib
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

import jspec
from convert import load_draft
from jspec.cli import main

ARCHIVE = Path(__file__).parent.parent / "golden" / "last_release.tar.xz"
FOLDERS = {
    **{"bfloat16": None, "int8": "int8", "fp8": "fp8", "int4": "int4", "eagle3": None},
    **{"fp8_block": "fp8_block", "latents": "fp8_block", "experts_in_pairs": None, "nvfp4": "nvfp4", "mxfp4": "mxfp4"},
    **{"gptq": "int4_32_float16_zeros", "gptq_in_another_order": "int4_32_float16_zeros_ordered"},
    **{"packed_zeros": "int4_32_float32_zeros", "packed_8_bits_groups": "int8_32_bfloat16_zeros"},
}


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    folder = tmp_path_factory.mktemp("release")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def digest(array) -> str:
    array = np.ascontiguousarray(np.asarray(array))
    return f"{array.dtype} {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"


@pytest.mark.parametrize("name", FOLDERS)
def test_parameters_of_converted_folders_are_those_that_were_read_then(release, name):
    config, params = load_draft(release / "converted" / name)
    assert getattr(config, "quantization", None) == FOLDERS[name]
    written = json.loads((release / "digests.json").read_text())[name]
    assert {param: digest(params[param]) for param in params} == written


@pytest.mark.parametrize("name", ["int4", "experts_in_pairs", "latents"])
def test_converted_folders_generate(release, name):
    llm = jspec.load(release / "converted" / name, max_batch=1, max_len=32, prefill_chunk=4)
    (result,) = llm.generate([[1, 2, 3]], jspec.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    assert len(result.token_ids) == 4


def test_training_runs_are_resumed(release):
    """The settings of the run, its state and its draft head are read, and the head that is written is the same."""
    head = release / "trained" / "head" / "model.safetensors"
    before = head.read_bytes()
    paths = f"--target {release}/target --data {release}/tokens.npz --out {release}/trained --resume"
    plan = "--steps 2 --evaluate-every 2 --tokens-per-step 128 --length 64 --prompts 2 --dtype float32"
    method = "--method eagle3 --num-draft-tokens 3 --draft-vocab-size 40"
    assert main(["train", *f"{paths} {plan} {method}".split()]) == 0
    assert head.read_bytes() == before
