"""``jspec train --tensor-parallel-size``: a run over several devices ends as one on a single device, can go on with another
number of them, and what cannot be split is refused before weights are read."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny_checkpoint
from train_toys import learnable

import jspec
from convert import load_draft
from jspec.cli import main
from jspec.outputs import Stats
from jspec.train import loop
from jspec.train.acceptance import TEMPERATURES, ServedAcceptance
from jspec.train.report import Log

pytestmark = pytest.mark.usefixtures("small_groups")
METHODS = {
    "eagle": [],
    "eagle3": ["--num-draft-tokens", "3", "--draft-vocab-size", "40"],
    "parallel": ["--num-draft-tokens", "3", "--draft-vocab-size", "40", "--layers", "1"],
    "mlp": ["--num-draft-tokens", "3", "--inner-size", "24", "--tie"],
    "medusa": ["--num-draft-tokens", "2", "--borrow-head"],
    "mtp": ["--num-draft-tokens", "2"],
    "dspark": ["--num-draft-tokens", "3", "--layers", "1", "--markov-rank", "8"],
    "dflash": ["--num-draft-tokens", "3", "--layers", "1", "--draft-vocab-size", "40"],
}
NIGHTLY = ("eagle", "mlp")  # and "eagle3" every time
PLAN = "--steps 20 --evaluate-every 10 --tokens-per-step 256 --length 32 --peak-rate 1e-2 --prompts 2 --dtype float32"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return learnable(tmp_path_factory.mktemp("train"))


@pytest.fixture
def unserved(monkeypatch):
    """Acceptance is not measured."""
    monkeypatch.setattr(ServedAcceptance, "__call__", lambda *_: dict.fromkeys(TEMPERATURES, Stats.of(1, [1], [1])))


def arguments(folder: Path, method: str, out: Path, *more: str) -> list[str]:
    paths = ["--target", str(folder / "target"), "--data", str(folder / "tokens.npz"), "--out", str(out)]
    return ["train", "--method", method, *paths, *PLAN.split(), *METHODS[method], *more]


def losses(out: Path) -> np.ndarray:
    """Held-out and training losses of every evaluation, ``[evaluations, 2]``; no training loss of step 0."""
    with (out / "losses.csv").open() as file:
        entries = list(csv.DictReader(file))
    return np.array([[float(entry[name] or 0) for name in ("held_out_loss", "train_loss")] for entry in entries])


def acceptance_lengths(out: Path) -> list[float]:
    return list(json.loads((out / "figures.json").read_text())["acceptance_length"].values())


@pytest.mark.parametrize(
    "method",
    [
        "eagle3",
        *(pytest.param(method, marks=pytest.mark.nightly) for method in NIGHTLY),
        *(pytest.param(method, marks=pytest.mark.long) for method in METHODS if method not in ("eagle3", *NIGHTLY)),
    ],
)
def test_sharded_run_ends_as_on_one_device(folder, tmp_path, method):
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(arguments(folder, method, one)) == 0
    assert main(arguments(folder, method, two, "--tensor-parallel-size", "2")) == 0
    np.testing.assert_allclose(losses(two), losses(one), rtol=1e-3)
    assert losses(one)[-1, 0] < 0.97 * losses(one)[0, 0]
    assert acceptance_lengths(two) == pytest.approx(acceptance_lengths(one), rel=0.05)
    assert [json.loads((out / "figures.json").read_text())["tensor_parallel"] for out in (one, two)] == [1, 2]

    config, params = load_draft(two / "head", "float32")
    assert config.method == method
    wanted = load_draft(one / "head", "float32")[1]
    assert all(np.abs(params[name] - wanted[name]).max() < 0.02 for name in wanted)


def test_head_trained_on_four_devices_serves(folder, tmp_path, unserved):
    assert main(arguments(folder, "eagle3", tmp_path / "out", "-tp", "4")) == 0
    target, head, small = folder / "target", tmp_path / "out" / "head", {"max_batch": 1, "max_len": 64}
    llms = [jspec.load(target, head, tensor_parallel=count, num_draft_tokens=3, **small) for count in (1, 4)]
    results = [jspec.generate(llm, [5, 9, 2], temperature=0, max_tokens=40, ignore_eos=True) for llm in llms]
    assert results[0].token_ids == results[1].token_ids
    assert results[0].stats == results[1].stats
    assert results[0].stats.mean_acceptance_length > 1.2


def stopped_at_10(folder: Path, out: Path, monkeypatch, *more: str):
    """A run that fails at step 20 with a state of step 10."""
    add = Log.add

    def stop_at_20(self, progress, served):
        if progress.step == 20:
            raise OSError("the disk is full")
        return add(self, progress, served)

    with monkeypatch.context() as patch:
        patch.setattr(Log, "add", stop_at_20)
        assert main(arguments(folder, "mlp", out, *more)) == 2


def test_run_resumes_on_any_number_of_devices(folder, tmp_path, monkeypatch, unserved):
    """With the same number its losses and weights are the same, with another the same up to rounding."""
    assert main(arguments(folder, "mlp", tmp_path / "whole", "-tp", "2")) == 0
    wanted = load_draft(tmp_path / "whole" / "head", "float32")[1]
    for before, after in ((2, 2), (2, 1), (1, 4)):
        out = tmp_path / f"{before}-{after}"
        stopped_at_10(folder, out, monkeypatch, "-tp", str(before))
        assert main(arguments(folder, "mlp", out, "-tp", str(after), "--resume")) == 0
        exact = before == after
        np.testing.assert_allclose(losses(out), losses(tmp_path / "whole"), rtol=0 if exact else 1e-3)
        found = load_draft(out / "head", "float32")[1]
        assert exact == all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_a_step_is_compiled_once(folder, tmp_path, unserved, monkeypatch):
    steps, make = [], loop.make_step
    monkeypatch.setattr(loop, "make_step", lambda *args: steps.append(make(*args)) or steps[-1])
    assert main(arguments(folder, "mlp", tmp_path / "out", "-tp", "2")) == 0
    stopped_at_10(folder, tmp_path / "again", monkeypatch, "-tp", "2")
    assert main(arguments(folder, "mlp", tmp_path / "again", "-tp", "2", "--resume")) == 0
    assert [step._cache_size() for step in steps] == [1, 1, 1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["-tp", "0"], "tensor_parallel=0: expected an integer of at least 1"),
        (["-tp", "3"], "tensor_parallel=3: expected a divisor of num_heads, 4"),
        (["-tp", "16"], "tensor_parallel=16: expected at most 8, the number of devices that JAX sees"),
        (
            ["-tp", "4", "--tokens-per-step", "192"],
            "tokens_per_step=192: expected 4 windows of 32 tokens or a multiple, as many for each device of "
            "tensor_parallel=4",
        ),
        (
            ["-tp", "4", "--length", "128", "--tokens-per-step", "512"],
            "3 held-out windows of 128 tokens; expected one for each device of tensor_parallel=4",
        ),
    ],
)
def test_unshardable_target_is_refused_before_weights_are_read(folder, tmp_path, capsys, monkeypatch, more, message):
    monkeypatch.setattr("jspec.train.run.build_model", lambda *_: pytest.fail("weights were read"))
    assert main(arguments(folder, "mlp", tmp_path / "wrong", *more)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "wrong").exists()


def test_several_processes_are_refused(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    assert main(arguments(folder, "mlp", tmp_path / "wrong", "-tp", "2")) == 2
    assert "2 processes train together: expected one" in capsys.readouterr().err


def test_expert_parallel_shards_whole_experts(folder, tmp_path, capsys):
    """Which is refused here, because two devices do not divide three experts."""
    target = str(tiny_checkpoint(tmp_path / "mixture", "MixtralForCausalLM"))
    more = ["--target", target, "-tp", "2", "--enable-expert-parallel"]
    assert main(arguments(folder, "mlp", tmp_path / "wrong", *more)) == 2
    assert "tensor_parallel=2: expected a divisor of the number of experts, 3" in capsys.readouterr().err
