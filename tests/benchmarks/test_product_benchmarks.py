"""The benchmarks of single products run, at tiny sizes, and print their tables."""

import sys

import pytest

from benchmarks.kernels import lowerings, small_batch_products, sums


def test_a_smoke_run_of_sums_prints_a_line_for_each_number_of_tokens(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sums", "--smoke", "--tokens", "1", "3", "--repeats", "1"])
    assert sums.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["tokens", "1", "3"]


@pytest.mark.parametrize(
    ("options", "last"), [((), "[64, 256] x 3"), (("--tune", "--forms", "int8", "rounded"), "Tiling(")]
)
def test_a_smoke_run_of_small_batch_products_finds_no_wrong_result(monkeypatch, capsys, options, last):
    for choices in ("CHOICES", "STREAMED_CHOICES"):
        monkeypatch.setattr(small_batch_products, choices, getattr(small_batch_products, choices)[1:2])
    monkeypatch.setattr(sys, "argv", ["small_batch_products", "--smoke", *options])
    assert small_batch_products.main() == 0
    found = capsys.readouterr().out
    assert "!" not in found
    assert "wrong" not in found
    assert last in found.splitlines()[-1]


def test_a_smoke_run_of_lowerings_compares_every_way_with_float32(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lowerings", "--smoke", "--tokens", "3", "--weights", "bf16", "blocks", "mxfp8"])
    assert lowerings.main() == 0
    table = capsys.readouterr().out.rpartition("\n\n")[2]
    assert [line.split()[:2] for line in table.splitlines()] == [
        ["weight", "tokens"],
        ["bf16", "3"],
        ["blocks", "3"],
        ["mxfp8", "3"],
    ]
