"""Every injected fault that the suite detects stands in ``tests/FAULTS.md``, so that none is lost unseen.

A test of this kind breaks the code on purpose, and passes if the suite's own checks fail then. Its name says so: it ends in
``_is_detected`` or ``_are_detected``. The parameters of such a test are faults too, or places in which one is looked for.
"""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = TESTS / "FAULTS.md"
TIERS = ("long", "nightly", "gpu")  # markers of tests that ``make test`` leaves out


def fault_tests() -> dict[str, str]:
    """``file::test`` of all fault tests -> the tier in which all of it runs, ``make test`` if it has no marker."""
    found = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(file.read_text())
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for parent in (tree, *classes):
            for node in parent.body:
                if isinstance(node, ast.FunctionDef) and re.fullmatch(r"test_.*_(is|are)_detected", node.name):
                    names = [parent.name, node.name] if isinstance(parent, ast.ClassDef) else [node.name]
                    marks = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
                    tier = next((tier for tier in TIERS if f"pytest.mark.{tier}" in marks), "test")
                    found["::".join([str(file.relative_to(TESTS)), *names])] = f"make {tier}"
    return found


def table() -> dict[str, str]:
    """The tests of the table -> their tier."""
    rows = [re.fullmatch(r"\| .+ \| `(\S+)` \| (make \w+) \|", line) for line in TABLE.read_text().splitlines()]
    return {row[1]: row[2] for row in rows if row}


def test_the_table_has_every_injected_fault():
    assert table() == fault_tests()


def test_every_row_of_the_table_is_read():
    header, *rows = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    assert header == "| fault | detected by | tier |"
    assert len(table()) == len(rows) > 30
