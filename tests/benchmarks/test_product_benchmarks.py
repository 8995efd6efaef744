"""The benchmarks of single products run, at tiny sizes, and print their tables."""

import sys

import pytest

from benchmarks import decode_products, narrow_products, sums


def test_smoke_runs_of_sums_and_products(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sums", "--smoke", "--tokens", "1", "3", "--repeats", "1"])
    assert sums.main() == 0
    monkeypatch.setattr(sys, "argv", ["decode_products", "--smoke", "--shards", "2", "--forms", "1", "reduced"])
    assert decode_products.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["tokens", "1", "3"]
    assert lines[-6].startswith("2 layers and head")
    assert lines[-1].startswith("down [32, 24] x 8")


@pytest.mark.parametrize(
    ("options", "last"), [((), "[64, 256] x 3"), (("--tune", "--forms", "int8", "rounded"), "Tiling(")]
)
def test_smoke_runs_of_narrow_products(monkeypatch, capsys, options, last):
    for choices in ("CHOICES", "STREAMED_CHOICES"):
        monkeypatch.setattr(narrow_products, choices, getattr(narrow_products, choices)[1:2])
    monkeypatch.setattr(sys, "argv", ["narrow_products", "--smoke", *options])
    assert narrow_products.main() == 0
    found = capsys.readouterr().out
    assert "!" not in found
    assert "wrong" not in found
    assert last in found.splitlines()[-1]
