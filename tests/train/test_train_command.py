"""``jspec train`` from end to end on a toy target.

With every method the draft head learns, raises the acceptance length, and is written in a layout that loads again.
"""

import csv
import json

import jax
import numpy as np
import pytest
from tiers import in_tiers
from tiny import tiny_checkpoint
from train_toys import learnable

import jspec
from convert import load_draft
from jspec.cli import main
from jspec.outputs import Stats
from jspec.train import command
from jspec.train.acceptance import TEMPERATURES, ServedAcceptance
from jspec.train.report import Log

METHODS = {
    "eagle": [],
    "eagle3": ["--num-draft-tokens", "3", "--draft-vocab-size", "40"],
    "parallel": ["--num-draft-tokens", "3", "--draft-vocab-size", "40", "--layers", "1"],
    "mlp": ["--num-draft-tokens", "3", "--inner-size", "24", "--tie"],
    "medusa": ["--num-draft-tokens", "3"],
    "mtp": ["--num-draft-tokens", "2"],
    "dspark": ["--num-draft-tokens", "3", "--layers", "1", "--markov-rank", "8"],
    "dflash": [
        *("--num-draft-tokens", "2", "--layers", "1", "--draft-vocab-size", "40", "--intermediate-size", "128"),
        *("--tokens-per-step", "2048", "--peak-rate", "4e-2"),  # a mask slot learns to read the anchor's late
    ],
}
FEW_STEPS = "--steps 2 --evaluate-every 2 --tokens-per-step 128 --length 64 --prompts 2 --dtype float32"
NOTHING = dict.fromkeys(TEMPERATURES, Stats.of(1, [1], [1]))
PLAN = "--steps 80 --evaluate-every 40 --tokens-per-step 256 --length 32 --peak-rate 2e-2 --prompts 2 --dtype float32"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a toy target and with token ids that look like its output."""
    return learnable(tmp_path_factory.mktemp("train"))


def arguments(folder, method: str, out: str, *more: str) -> list[str]:
    paths = ["--target", str(folder / "target"), "--data", str(folder / "tokens.npz"), "--out", str(folder / out)]
    return ["train", "--method", method, *paths, *PLAN.split(), *METHODS[method], *more]


@pytest.mark.parametrize("method", in_tiers(METHODS, test=("eagle3", "dspark")))
def test_every_method_trains(folder, method, capsys):
    assert main(arguments(folder, method, method)) == 0
    out = folder / method
    with (out / "losses.csv").open() as file:
        entries = list(csv.DictReader(file))
    assert [int(entry["step"]) for entry in entries] == [0, 40, 80]
    assert float(entries[-1]["held_out_loss"]) < 0.97 * float(entries[0]["held_out_loss"])
    assert float(entries[-1]["train_loss"]) < float(entries[1]["train_loss"])
    for column in ("acceptance_length_t0", "acceptance_length_t1"):
        lengths = [float(entry[column]) for entry in entries]
        assert lengths[-1] > max(lengths[0] + 0.3, 1.4)  # two prompts say it to a tenth
    figures = json.loads((out / "figures.json").read_text())
    assert figures["held_out_loss"] == pytest.approx(
        min(float(entry["held_out_loss"]) for entry in entries[1:]), rel=1e-4
    )
    assert figures["versions"]["jspec"] == jspec.__version__
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert f"acceptance length {figures['acceptance_length']['0']:.2f} at temperature 0" in capsys.readouterr().out

    config, params = load_draft(out / "head", "float32")
    assert config.method == method
    assert sum(np.size(array) for array in params.values()) == config.num_parameters == figures["parameters"]


@pytest.mark.nightly
def test_heads_of_a_target_with_recurrent_states_train_and_serve(tmp_path, capsys):
    target, text = (
        tiny_checkpoint(tmp_path / "target", "Qwen3_5ForCausalLM"),
        np.random.default_rng(0).integers(97, size=900),
    )
    np.savez(tmp_path / "tokens.npz", train=text[:700], held_out=text[700:])
    plan = FEW_STEPS.split()
    paths = ["--target", str(target), "--data", str(tmp_path / "tokens.npz"), "--out", str(tmp_path / "out")]
    assert main(["train", "--method", "eagle", *paths, *plan]) == 0
    assert "acceptance length" in capsys.readouterr().out
    llm = jspec.load(target, tmp_path / "out" / "head", max_batch=2, max_len=96)
    [result] = jspec.generate(llm, [text[:70].tolist()], temperature=0, max_tokens=9, ignore_eos=True)
    assert len(result.token_ids) == 9


def test_the_trained_head_serves(folder):
    if not (folder / "eagle3").exists():
        assert main(arguments(folder, "eagle3", "eagle3")) == 0
    head = folder / "eagle3" / "head"  # it names its target
    llm = jspec.load(head, speculation=jspec.Speculation(num_draft_tokens=3), max_batch=1, max_len=64)
    result = jspec.generate(llm, [5, 9, 2], temperature=0, max_tokens=40, ignore_eos=True)
    assert isinstance(result, jspec.Result)
    assert llm.method == "eagle3"
    assert result.stats.mean_acceptance_length > 1.5


def test_acceptance_is_measured_on_the_prompts_of_a_file(folder, monkeypatch, capsys):
    """They are what the engine completes, in place of excerpts of the held-out text."""
    measured: list[list[list[int]]] = []
    measure = ServedAcceptance.__call__

    def recorded(served, params):
        measured.append(served._prompts)
        return measure(served, params)

    monkeypatch.setattr(ServedAcceptance, "__call__", recorded)
    monkeypatch.setattr("jspec.checkpoints.checkpoint.load_tokenizer", lambda _: Letters())
    (folder / "prompts.txt").write_text("abc\n\nhello\n" + 99 * "x" + "\n")
    few = ["--steps", "2", "--evaluate-every", "2"]
    assert main(arguments(folder, "medusa", "on-prompts", *few, "--prompts", str(folder / "prompts.txt"))) == 0
    assert measured[-1] == [[1, 2, 3], [8, 5, 12, 12, 15], [24] * 64]
    assert "acceptance length 1." in capsys.readouterr().out
    monkeypatch.setattr(ServedAcceptance, "__call__", lambda served, _: measured.append(served._prompts) or NOTHING)
    assert main(arguments(folder, "medusa", "on-excerpts", *few, "--prompts", "3")) == 0
    assert [len(prompt) for prompt in measured[-1]] == [32] * 3
    held_out = np.load(folder / "tokens.npz")["held_out"].tolist()
    assert measured[-1][0] == held_out[:32]


class Letters:
    """A tokenizer of small letters."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 96 for letter in text]


@pytest.mark.parametrize("method", ["mlp", "dspark"])  # dspark draws its anchors at random
def test_a_resumed_run_gives_the_same_head(folder, method, monkeypatch):
    monkeypatch.setattr(ServedAcceptance, "__call__", lambda *_: NOTHING)
    whole, stopped, add = f"whole-{method}", f"stopped-{method}", Log.add
    assert main(arguments(folder, method, whole)) == 0

    def stop_at_80(self, progress, served):
        if progress.step == 80:
            raise OSError("the disk is full")
        return add(self, progress, served)

    monkeypatch.setattr(Log, "add", stop_at_80)
    assert main(arguments(folder, method, stopped)) == 2
    monkeypatch.setattr(Log, "add", add)
    assert not (folder / stopped / "head").exists()
    assert main(arguments(folder, method, stopped, "--resume")) == 0

    results = []
    for out in (folder / whole, folder / stopped):
        with (out / "losses.csv").open() as file:
            entries = [{**entry, "seconds": None} for entry in csv.DictReader(file)]
        results.append((entries, load_draft(out / "head", "float32")[1]))
    assert results[0][0] == results[1][0]
    jax.tree.map(np.testing.assert_array_equal, results[0][1], results[1][1])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--target", "nowhere"], "target='nowhere': expected a checkpoint folder"),
        (["--data", "nowhere"], "data='nowhere' does not exist"),
        (["--resume"], "holds no run to resume"),
        (["--steps", "0"], "steps=0: expected an integer of at least 1"),
        (["--length", "129"], "tokens_per_step=128: expected a window, 129"),
        (["--length", "200", "--tokens-per-step", "200"], "length=200: expected in 5..128, the target's positions"),
        (["--length", "4"], "length=4: expected in 5..128"),
        (["--prompts", "0"], "prompts=0: expected an integer of at least 1"),
        (["--prompts", "-3"], "prompts=-3: expected an integer of at least 1"),
        (["--prompts", "nowhere.txt"], "prompts='nowhere.txt': expected a file of text in UTF-8"),
        (["--prompts", __file__], "the target has no tokenizer: expected prompts of token ids"),
        (["--layers", "2"], "layers=2: expected nothing, a head of method 'mlp' has no such size"),
    ],
)
def test_a_wrong_argument_gives_a_one_line_error(folder, capsys, more, message):
    assert main(arguments(folder, "mlp", "wrong", "--tokens-per-step", "128", *more)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jspec train: ")
    assert err.count("\n") == 1
    assert message in err
    assert not (folder / "wrong").exists()


def test_divergence_is_reported(folder, capsys, monkeypatch):
    monkeypatch.setattr(ServedAcceptance, "__call__", lambda *_: NOTHING)
    steep = ["--peak-rate", "1e30", "--steps", "3", "--evaluate-every", "3"]
    assert main(arguments(folder, "mlp", "steep", *steep)) == 2
    assert "held-out loss nan at step 3: lower the learning rate" in capsys.readouterr().err


def test_methods_are_known_before_training_is_imported():
    assert METHODS.keys() == set(command.METHODS)


def test_an_earlier_run_is_not_overwritten(folder, capsys):
    (folder / "used").mkdir()
    (folder / "used" / "notes").touch()
    assert main(arguments(folder, "mlp", "used")) == 2
    assert "is not empty: expected a new folder, or --resume to continue its run" in capsys.readouterr().err


def test_a_run_is_resumed_with_its_own_settings_only(folder, capsys):
    (folder / "earlier").mkdir()
    (folder / "earlier" / "settings.json").write_text(json.dumps({"method": "mlp", "seed": 0}))
    assert main(arguments(folder, "mlp", "earlier", "--resume", "--seed", "1")) == 2
    assert "expected None, with which the run in" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--method", "hydra"], ["--taps", "1,x"], []])
def test_usage_errors_exit_with_2(capsys, more):
    with pytest.raises(SystemExit) as exit_:
        main(["train", "--target", "t", "--data", "d", *more])
    assert exit_.value.code == 2
    assert "usage: jspec train" in capsys.readouterr().err
