"""Every injected fault that the suite detects stands in ``tests/FAULTS.md``, so that none is lost unseen.

A test of this kind breaks the code on purpose, and passes if the suite's own checks fail then. Its name says so: it ends in
``_is_detected`` or ``_are_detected``. The parameters of such a test are faults too, or places in which one is looked for.
"""

import re

from tiers import TESTS, fault_tests

TABLE = TESTS / "FAULTS.md"


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
