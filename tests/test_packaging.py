"""What an installed jspec has: every module and the family of checkpoints, and console scripts that work anywhere."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import jspec
from jspec.commands.demo import FAMILY

ROOT = Path(__file__).parents[1]
PACKAGES = ("jspec", "convert")


def files_of(package: str) -> set[str]:
    """Paths of everything in the folder of a package, relative to the repository."""
    found = (path for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in found}


def test_every_folder_of_modules_is_a_package():
    """Others are not found: ``namespaces = false`` in pyproject.toml."""
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_other_files_are_package_data():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]
    for package in PACKAGES:
        listed = {path for pattern in patterns.get(package, []) for path in (ROOT / package).glob(pattern)}
        data = {ROOT / name for name in files_of(package) if not name.endswith(".py")}
        assert data == {path for path in listed if path.is_file()}


def test_the_family_is_in_the_package():
    assert FAMILY.parent == Path(jspec.__file__).parent
    for name in ("target", "draft", "eagle", "eagle3", "parallel", "mlp", "dspark"):
        assert (FAMILY / name / "config.json").is_file()


@pytest.mark.long
def test_a_wheel_works_beside_a_users_own_convert(tmp_path):
    """It builds the wheel, for which pip downloads setuptools, and installs it without what it depends on."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 40e6
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == set.union(*(files_of(package) for package in PACKAGES))

    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(installed), str(wheel)], check=True)
    elsewhere.mkdir()
    (elsewhere / "convert.py").write_text("raise SystemExit('this is the convert.py of a user')")

    def run(script: str, *arguments: str) -> str:
        command = [sys.executable, str(installed / "bin" / script), *arguments]
        environment = {**os.environ, "PYTHONPATH": str(installed)}
        return subprocess.run(
            command, cwd=elsewhere, env=environment, check=True, capture_output=True, text=True
        ).stdout

    assert run("jspec", "--version") == f"jspec {jspec.__version__}\n"
    assert "acceptance length" in run("jspec", "demo", "--max-tokens", "8")
    assert "usage: jspec-convert" in run("jspec-convert", "--help")
