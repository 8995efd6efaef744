"""The table of docs/guides/models.md follows from the registry and the cases that are tested."""

import importlib.util
import json
from pathlib import Path

import pytest
from parity_cases import CASES

from jspec.checkpoints.huggingface.families import FAMILIES

HYBRIDS = [name for name, family in FAMILIES.items() if family.has_delta_nets]
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
    tests = "<!-- tests -->\n<!-- /tests -->\n"
    script.PAGE.write_text(f"Before.\n<!-- families -->\nsomething else\n<!-- /families -->\n{tests}After.\n")
    assert script.main(CASES, check=True) == 1
    assert "run docs/models_table.py" in capsys.readouterr().err
    assert script.main(CASES, check=False) == 0
    text = script.PAGE.read_text()
    assert text.startswith("Before.\n<!-- families -->\n| `architectures` |")
    assert "\n<!-- /families -->\n<!-- tests -->\n| `architectures` |" in text
    assert text.endswith(".\n<!-- /tests -->\nAfter.\n")
    assert script.main(CASES, check=True) == 0


JUNIT = """<testsuites><testsuite>
<testcase name="test_logits_equal_transformers[llama]"/>
<testcase name="test_logits_equal_transformers[llama-tied]"><failure/></testcase>
<testcase name="test_logits_equal_transformers[qwen2]"><skipped/></testcase>
<testcase name="test_drafts_leave_the_greedy_text_of_the_target[LlamaForCausalLM-eagle]"/>
<testcase name="test_something_else[llama]"/>
<testcase name="test_joint_distribution_of_completions[match-eagle-sample-Llama-20000]"/>
<testcase name="test_joint_distribution_of_completions[match-eagle-sample-Llama-200000]"/>
<testcase name="test_joint_distribution_of_completions[match-eagle-sample-Llama-100000]"/>
</testsuite></testsuites>"""


def test_results_of_tests_are_counted(script, tmp_path):
    script.RESULTS = tmp_path / "results.json"
    (tmp_path / "run.xml").write_text(JUNIT)
    script.add_results([tmp_path / "run.xml"])
    results = json.loads(script.RESULTS.read_text())
    name = "test_logits_equal_transformers"
    assert results["tests"] == {
        "test_drafts_leave_the_greedy_text_of_the_target[LlamaForCausalLM-eagle]": True,
        "test_joint_distribution_of_completions[match-eagle-sample-Llama-100000]": True,
        "test_joint_distribution_of_completions[match-eagle-sample-Llama-200000]": True,
        f"{name}[llama]": True,
        f"{name}[llama-tied]": False,
    }
    [llama] = [line for line in script.tested(CASES, results).splitlines() if "`LlamaForCausalLM`" in line]
    assert llama == "| `LlamaForCausalLM` | - | 1 of 2 | - | - | - | 1 | - | - | 2 |"
    [qwen] = [line for line in script.tested(CASES, results).splitlines() if "`Qwen2ForCausalLM`" in line]
    assert set(qwen.split("|")[2:-1]) == {" - "}
    # A later run replaces what it ran, and keeps the rest.
    (tmp_path / "run.xml").write_text(JUNIT.replace("<failure/>", ""))
    script.add_results([tmp_path / "run.xml"])
    assert all(json.loads(script.RESULTS.read_text())["tests"].values())


def test_every_family_was_tested_in_every_column(script):
    results = json.loads(script.RESULTS.read_text())
    cells = [line.split("|")[2:-1] for line in script.tested(CASES, results).splitlines() if "ForCausalLM" in line]
    assert len(cells) == len(FAMILIES)
    assert all(cell.strip().isdigit() or cell.strip() == script.REFUSED for row in cells for cell in row)
    assert sum(cell.strip() == script.REFUSED for row in cells for cell in row) == len(HYBRIDS)


def test_every_family_has_cases_and_every_case_a_family(script):
    assert {f"{prefix}ForCausalLM" for prefix, _ in CASES.values()} == set(FAMILIES)
    assert all(f"`{architecture}`" in script.table(CASES) for architecture in FAMILIES)
