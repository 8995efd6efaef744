"""A draft of every kind with new weights has the arrays of one that was loaded with these, bit for bit."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_heads
from mtp_checkpoints import with_layers
from safetensors.numpy import load_file, save_file
from tiny import SMALL, tiny_checkpoint

import jspec
from jspec.commands.demo import FAMILY

load: Any = jspec.load
MAKERS: dict[str, Any] = {
    "draft model": tiny_checkpoint,
    "eagle": tiny_heads.eagle,
    "eagle3": tiny_heads.eagle3,
    "p-eagle": tiny_heads.p_eagle,
    "speculators": tiny_heads.speculators,
    "speculators, peagle": lambda path, seed: tiny_heads.speculators(path, "peagle", seed=seed),
    "pard": tiny_heads.pard,
    "mlp": tiny_heads.mlp_speculator,
    "medusa": tiny_heads.medusa,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=3, num_hidden_layers=8)


def held(folder: Path) -> dict[str, np.ndarray]:
    return load_file(next(folder.glob("*.safetensors")))


def require_same(llm: Any, fresh: Any):
    own, expected = (one.engine.runner.batch.leaves[1] for one in (llm, fresh))
    assert len(own) == len(expected) > 0
    for array, wanted in zip(own, expected, strict=True):
        assert array.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(array), np.asarray(wanted))


@pytest.mark.parametrize("kind", MAKERS)
def test_a_draft_is_written_as_it_is_loaded(target, tmp_path, kind):
    before, after = (MAKERS[kind](tmp_path / str(seed), seed=seed) for seed in (1, 2))
    llm, fresh = (load(target, folder, num_draft_tokens=2, **SMALL) for folder in (before, after))
    kept = [np.asarray(leaf) for leaf in llm.engine.runner.batch.leaves[1]]
    assert any((x != np.asarray(y)).any() for x, y in zip(kept, fresh.engine.runner.batch.leaves[1], strict=True))
    llm.update_weights(draft=held(after))
    require_same(llm, fresh)
    llm.restore()
    for leaf, wanted in zip(llm.engine.runner.batch.leaves[1], kept, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), wanted)


def test_layers_for_multi_token_prediction_are_written_as_they_are_loaded(tmp_path):
    """Under the names that they have in the target's folder, which has all of them."""
    before = with_layers(tmp_path / "before", layers=1)
    tensors = held(before)
    first = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    changed = {n: x * np.float32(1.5) if f"layers.{first}." in n and x.ndim == 1 else x for n, x in tensors.items()}
    after = tmp_path / "after"
    after.mkdir()
    shutil.copyfile(before / "config.json", after / "config.json")
    save_file(changed, after / "model.safetensors")
    llm, fresh = (load(folder, "mtp", num_draft_tokens=2, **SMALL) for folder in (before, after))
    llm.update_weights(draft=changed)
    require_same(llm, fresh)


def test_a_block_drafter_is_written_as_it_is_loaded(tmp_path):
    changed = {name: x * x.dtype.type(0.5) for name, x in held(FAMILY / "dspark").items()}
    shutil.copyfile(FAMILY / "dspark" / "config.json", tmp_path / "config.json")
    save_file(changed, tmp_path / "model.safetensors")
    llm, fresh = (load(FAMILY / "target", folder, **SMALL) for folder in (FAMILY / "dspark", tmp_path))
    llm.update_weights(draft=changed)
    require_same(llm, fresh)


def test_target_and_draft_together_draft_as_a_fresh_pair(tmp_path):
    """The same texts in as many rounds: as many drafts are accepted."""
    folders = [tiny_checkpoint(tmp_path / f"target {seed}", seed=seed, num_hidden_layers=8) for seed in (5, 6)]
    heads = [tiny_heads.eagle3(tmp_path / f"head {seed}", seed=seed) for seed in (5, 6)]
    llm, fresh = (load(*pair, num_draft_tokens=3, **SMALL) for pair in zip(folders, heads, strict=True))
    how = {"max_tokens": 24, "seed": 1, "temperature": 0.3, "ignore_eos": True}
    prompts = [[3, 4, 5], [7], list(range(20, 45))]
    llm.generate(prompts, **how)
    llm.update_weights(held(folders[1]), draft=held(heads[1]))
    pairs = zip(llm.generate(prompts, **how), fresh.generate(prompts, **how), strict=True)
    assert all((one.token_ids, one.stats) == (other.token_ids, other.stats) for one, other in pairs)
