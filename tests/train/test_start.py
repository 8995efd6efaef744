"""``jspec train --start``: a run starts from the weights of a head that another one wrote."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
from train_toys import learnable

from jspec.checkpoints.export import export_draft
from jspec.train.loop import TrainingPlan
from jspec.train.methods import Sizes
from jspec.train.run import TrainingRun, initialise, prepare

SIZES = {
    "eagle": Sizes(),
    "eagle3": Sizes(num_draft_tokens=3, draft_vocab_size=40),
    "parallel": Sizes(num_draft_tokens=3, draft_vocab_size=40, layers=1),
    "mlp": Sizes(num_draft_tokens=3, inner_size=24, tie=True),
    "medusa": Sizes(num_draft_tokens=3),
    "mtp": Sizes(num_draft_tokens=2),
    "dspark": Sizes(num_draft_tokens=3, layers=1, markov_rank=8),
    "dflash": Sizes(num_draft_tokens=2, layers=1, draft_vocab_size=40),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return learnable(tmp_path_factory.mktemp("start"))


def run_of(folder: pathlib.Path, method: str, start: pathlib.Path | None = None) -> TrainingRun:
    plan = TrainingPlan(steps=2, peak_rate=1e-3, weight_decay=0.0, tokens_per_step=128, length=64)
    paths = folder / "target", folder / "tokens.npz", folder / "out"
    return TrainingRun(method, *paths, plan, SIZES[method], dtype="float32", start=start)


def exported(folder: pathlib.Path, method: str) -> tuple[pathlib.Path, dict]:
    """A folder with a head that no run starts with, and all its parameters."""
    out, run = folder / f"{method}-head", run_of(folder, method)
    inputs = prepare(run)
    params, constants, _ = initialise(run, inputs)
    params, config = {name: array + 1 for name, array in params.items()}, inputs.objective.config
    export_draft(out, config, {**params, **constants}, target_name="t", target_architectures=["x"], dtype="float32")
    return out, {**params, **constants}


@pytest.mark.parametrize("method", SIZES)
def test_a_run_starts_from_the_weights_of_a_head(folder, method):
    head, wanted = exported(folder, method)
    run = run_of(folder, method, head)
    params, constants, _ = initialise(run, prepare(run))
    jax.tree.map(np.testing.assert_array_equal, {**params, **constants}, wanted)


def test_heads_of_other_sizes_and_methods_are_refused(folder):
    head, _ = exported(folder, "eagle3")
    other = dataclasses.replace(run_of(folder, "eagle3", head), sizes=Sizes(draft_vocab_size=30))
    with pytest.raises(ValueError, match="its head has draft_vocab_size=40; expected 30, as the sizes of this run say"):
        prepare(other)
    with pytest.raises(ValueError, match=r"start='.*': expected a draft head for method 'mlp'"):
        prepare(run_of(folder, "mlp", head))
