"""What benchmarks say of mixtures of experts: how many experts a pass hits, and the floor that follows."""

import sys

import pytest

from benchmarks import experts, floors, mixtures, results
from benchmarks.experts_hit import experts_hit
from benchmarks.shapes import GPT_OSS_20B, GPT_OSS_120B, QWEN3_30B_A3B, TINY, TINY_MIXTURE, random_module


@pytest.fixture(scope="module")
def target():
    return random_module(TINY_MIXTURE, dtype="float32")


def test_one_token_hits_as_many_experts_as_it_goes_through(target):
    assert experts_hit(target, 1, 1) == TINY_MIXTURE.experts.chosen
    many = experts_hit(target, 8, 4)
    assert TINY_MIXTURE.experts.chosen < many <= TINY_MIXTURE.experts.count
    assert experts_hit(random_module(TINY, dtype="float32"), 1, 1) is None


def test_the_floor_counts_the_experts_that_were_hit(target):
    everything, half = floors.language_model(target, 8), floors.language_model(target, 4)
    experts = sum(
        floors.weights_of(part).bytes for layer in target.layers for part in (layer.mlp.gate_up, layer.mlp.down)
    )
    assert everything.bytes == floors.weights_of(target, ("embedding",)).bytes
    assert everything.bytes - half.bytes == experts / 2
    # Products: two of eight experts whatever was hit, and all that is no expert.
    assert everything.numbers == half.numbers
    dense = floors.weights_of(target, ("embedding", "gate_up", "down")).numbers
    assert half.numbers == dense + TINY_MIXTURE.num_layers * 2 * 3 * 32 * 64


def test_windows_bound_the_slots_that_are_read(target):
    assert floors.target_pass(target, 1, 1, 8, 2).kv_bytes == floors.kv_bytes(target, 8)
    assert floors.target_pass(target, 1, 1, 80, 2).kv_bytes == floors.kv_bytes(target, (4 * 8 + 3 * 80) / 7)


@pytest.mark.parametrize(
    ("config", "billions", "gigabytes"),
    [(QWEN3_30B_A3B, 30.5, 61.1), (GPT_OSS_20B, 20.9, 13.8), (GPT_OSS_120B, 116.8, 65.2)],
)
def test_shapes_have_the_published_sizes(config, billions, gigabytes):
    assert config.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert config.weight_bytes(2) / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_smoke_run(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["mixtures", "--smoke", "--lines", "2", "--json", str(tmp_path / "out.json")])
    assert mixtures.main() == 0
    found = results.read(tmp_path / "out.json")
    assert found.measured["2"] > found.floors["2"] > 0
    assert "of 8 experts" in capsys.readouterr().out


@pytest.mark.parametrize("layer", ["gpt-oss-20b", pytest.param("qwen3-30b-a3b", marks=pytest.mark.long)])
def test_smoke_run_of_a_layer(monkeypatch, capsys, tmp_path, layer):
    arguments = ["experts", "--smoke", "--layer", layer, "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", arguments)
    assert experts.main() == 0
    assert capsys.readouterr().out.count("beside others the same") == 2
    found = results.read(tmp_path / "out.json")
    assert found.details["1 tokens"]["experts"] == 2
    assert all(found.measured[key] > found.floors[key] > 0 for key in found.measured)


def test_every_line_has_a_key_of_its_own():
    keys = [(line.number, line.variant) for lines in mixtures.LINES.values() for line in lines]
    assert len(set(keys)) == len(keys)
