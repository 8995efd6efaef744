"""The table of docs/models.md follows from the registry and the cases that are tested."""

import importlib.util
from pathlib import Path

import pytest
from parity_cases import CASES

from jspec.checkpoints.families import FAMILIES

SCRIPT = Path(__file__).parents[2] / "docs" / "models_table.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("models_table", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(script):
    assert script.main(CASES, check=True) == 0


def test_a_page_that_is_not_is_found_and_written(script, tmp_path, capsys):
    script.PAGE = tmp_path / "models.md"
    script.PAGE.write_text("Before.\n<!-- families -->\nsomething else\n<!-- /families -->\nAfter.\n")
    assert script.main(CASES, check=True) == 1
    assert "run docs/models_table.py" in capsys.readouterr().err
    assert script.main(CASES, check=False) == 0
    text = script.PAGE.read_text()
    assert text.startswith("Before.\n<!-- families -->\n| `architectures` |")
    assert text.endswith("<!-- /families -->\nAfter.\n")
    assert script.main(CASES, check=True) == 0


def test_every_family_has_cases_and_every_case_a_family(script):
    assert {f"{prefix}ForCausalLM" for prefix, _ in CASES.values()} == set(FAMILIES)
    assert all(f"`{architecture}`" in script.table(CASES) for architecture in FAMILIES)
