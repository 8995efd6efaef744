"""Layers for multi-token prediction in GGUF files, which draft for their model."""

import numpy as np
import pytest
from gguf_checkpoints import write_gguf
from gguf_models import MODELS, save

import jspec
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.layouts.options import HeadOptions

gguf = pytest.importorskip("gguf")
pytest.importorskip("torch")
NAMES = ("qwen3.5", "qwen3.5-moe")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Makes the folder of a model of ``MODELS``, with its file in F32 and one in Q8_0."""
    made = {}

    def make(name: str):
        if name not in made:
            case, changes = MODELS[name]
            folder = made[name] = tmp_path_factory.mktemp(name)
            settings = save(folder, case, **changes)
            write_gguf(folder, folder / "f32.gguf", settings=settings)
            write_gguf(folder, folder / "q8_0.gguf", lambda *_: gguf.GGMLQuantizationType.Q8_0, settings)
        return made[name]

    return make


@pytest.mark.parametrize("name", NAMES)
def test_layers_are_those_of_the_folder(folder_of, name):
    folder, options = folder_of(name), HeadOptions(mtp=True)
    ours, theirs = (Checkpoint.open(path).mtp(options) for path in (folder / "f32.gguf", folder))
    assert ours.config == theirs.config
    found, wanted = ours.params("float32"), theirs.params("float32")
    assert set(found) == set(wanted)
    for key in wanted:
        np.testing.assert_allclose(
            found[key], wanted[key], rtol=0, atol=3e-7, err_msg=key
        )  # norms are stored with 1 more


def test_drafts_change_no_text(folder_of):
    path = folder_of("qwen3.5") / "q8_0.gguf"
    prompts, how = [[3, 1, 4, 1, 5], [9, 2, 6]], {"dtype": "float32", "max_len": 64, "max_batch": 2}
    params = [jspec.SamplingParams(temperature=0.0, max_tokens=12), jspec.SamplingParams(seed=7, max_tokens=12)]
    with pytest.warns(UserWarning, match="dequantised"):  # betas and decays, as of any checkpoint
        plain = jspec.load(path, **how)
    with pytest.warns(UserWarning, match="dequantised"):
        drafting = jspec.load(path, draft="mtp", num_draft_tokens=2, **how)
    plainly, drafted = (llm.generate(prompts, params) for llm in (plain, drafting))
    assert drafted[0].token_ids == plainly[0].token_ids
    assert all(result.stats.num_draft_tokens > 0 for result in drafted)
