"""The table of tests that ``make nightly`` has alone."""

import re

import pytest
import test_fault_table
from tiers import TESTS, is_nightly, table


@pytest.mark.parametrize("entry", table())
def test_an_entry_names_a_test(entry):
    file, *names = entry.split("::")
    source = (TESTS / file).read_text()
    assert all(re.search(rf"^ *(class|def) {name}\b", source, re.MULTILINE) for name in names), entry


def test_no_injected_fault_is_left_out():
    assert not [name for name in test_fault_table.fault_tests() if is_nightly(name, 0, table())]


def test_parameters_that_match_stay():
    entries = {"a/b.py::test_it": ["x-1", r"y\]"], "a/b.py::TestAll": []}
    nodes = ["a/b.py::test_it[x-1-z]", "a/b.py::test_it[y]", "a/b.py::test_it[y-2]", "a/b.py::test_other[y-2]"]
    assert [is_nightly(node, 0, entries) for node in nodes] == [False, False, True, False]
    assert is_nightly("a/b.py::TestAll::test_one[1]", 0, entries)


def test_every_third_parameter_stays():
    assert [is_nightly("a/b.py::test_it[x]", i, {"a/b.py::test_it": 3}) for i in range(4)] == [False, True, True, False]
