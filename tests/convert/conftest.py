"""Checkpoints to convert, and the assertion that one is refused."""

import pytest
from tiny import tiny_checkpoint

from convert.cli import main


@pytest.fixture
def src(tmp_path):
    """A sharded checkpoint, alone in its parent."""
    return tiny_checkpoint(tmp_path / "src", shards=2)


@pytest.fixture
def single(tmp_path):
    """A checkpoint in one file, alone in its parent."""
    return tiny_checkpoint(tmp_path / "src")


@pytest.fixture
def refused(capsys):
    """A function: convert ``src``, and assert exit code 2, one sentence that holds ``names``, and nothing written."""

    def convert_and_assert(src, *names: str):
        code = main([str(src), str(src.parent / "out")])
        error = capsys.readouterr().err
        assert code == 2
        assert error.startswith("jspec-convert: ")
        assert error.count("\n") == 1
        for name in names:
            assert name in error
        assert sorted(path.name for path in src.parent.iterdir() if path.name != "elsewhere") == ["src"]

    return convert_and_assert


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A function: name of ``wrapper_checkpoints.WRAPPED`` -> its folder and the model of transformers, made once. Tests must
    not change it."""
    from wrapper_checkpoints import save_wrapper  # which needs transformers

    made = {}

    def folder_of(name, **changes):
        key = (name, *changes.items())
        if key not in made:
            folder = tmp_path_factory.mktemp(name)
            made[key] = folder, save_wrapper(folder, name, **changes)
        return made[key]

    return folder_of
