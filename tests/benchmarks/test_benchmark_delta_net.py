"""The benchmark of gated delta nets, on a small shape and interpreted."""

import sys

import pytest

from benchmarks.kernels import delta_net
from benchmarks.report import results


@pytest.mark.nightly
def test_a_smoke_run_compares_and_measures(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["delta_net", "--smoke", "--json", str(tmp_path / "out.json")])
    assert delta_net.main() == 0
    assert "WRONG" not in capsys.readouterr().out
    result = results.read(tmp_path / "out.json")
    assert all(result.measured[key] > result.floors[key] > 0 for key in result.measured)


def test_the_floor_of_a_verify_pass_is_one_read_and_one_write():
    """Of 3 MiB for each row: 144 MiB in the 48 layers of a 27B model."""
    assert 48 * delta_net.state_bytes(delta_net.QWEN, 1) == 144 * 2**20
