"""The table of tests that ``make nightly`` has alone."""

import collections
import re

import pytest
from tiers import COLLECTED, TESTS, entry_of, fault_tests, is_nightly, table


@pytest.mark.parametrize("entry", table())
def test_an_entry_names_a_test(entry):
    file, *names = entry.split("::")
    source = (TESTS / file).read_text()
    assert all(re.search(rf"^ *(class|def) {name}\b", source, re.MULTILINE) for name in names), entry


def test_an_injected_fault_stays_with_some_of_its_parameters():
    """Of the faults that this run collected: all of them where it collected all tests."""
    entries, faults = table(), fault_tests()
    nodes = [node for node in COLLECTED if node.partition("[")[0] in faults]
    kept = {node.partition("[")[0] for node in nodes if not is_nightly(node, 0, entries)}
    assert {node.partition("[")[0] for node in nodes} == kept


def test_every_expression_finds_a_test():
    """Of the entries whose tests this run collected."""
    entries, names = table(), collections.defaultdict(list)
    for node in COLLECTED:
        names[entry_of(node, entries)].append(node.rpartition("::")[2])
    expressions = [
        (entry, pattern) for entry in names if isinstance(entries.get(entry), list) for pattern in entries[entry]
    ]
    assert not [
        (entry, pattern) for entry, pattern in expressions if not any(re.search(pattern, name) for name in names[entry])
    ]


def test_parameters_that_match_stay():
    entries = {"a/b.py::test_it": ["x-1", r"y\]"], "a/b.py::TestAll": []}
    nodes = ["a/b.py::test_it[x-1-z]", "a/b.py::test_it[y]", "a/b.py::test_it[y-2]", "a/b.py::test_other[y-2]"]
    assert [is_nightly(node, 0, entries) for node in nodes] == [False, False, True, False]
    assert is_nightly("a/b.py::TestAll::test_one[1]", 0, entries)


def test_every_third_parameter_stays():
    assert [is_nightly("a/b.py::test_it[x]", i, {"a/b.py::test_it": 3}) for i in range(4)] == [False, True, True, False]
