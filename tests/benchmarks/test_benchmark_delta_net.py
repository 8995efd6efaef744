"""The benchmark of gated delta nets, on a small shape and interpreted."""

import pytest

from benchmarks.kernels import delta_net


@pytest.mark.nightly
def test_a_smoke_run_compares_and_measures(measured, capsys):
    result = measured(delta_net, "--smoke")
    assert "WRONG" not in capsys.readouterr().out
    assert all(result.measured[key] > result.floors[key] > 0 for key in result.measured)


def test_the_floor_of_a_verify_pass_is_one_read_and_one_write():
    """Of 3 MiB for each row: 144 MiB in the 48 layers of a 27B model."""
    assert 48 * delta_net.state_bytes(delta_net.QWEN, 1) == 144 * 2**20
