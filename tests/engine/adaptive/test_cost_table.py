"""Cost tables: JSON, interpolation, and refusals."""

import json

import pytest

from jspec.config import TreeShape
from jspec.engine.adaptive.cost_table import CostTable

ROUNDS = {1: {0: 1.0, 2: 2.0, 4: 6.0}, 5: {0: 3.0, 2: 4.0, 4: 10.0}}
TABLE = CostTable("card", "eagle3", ROUNDS)


def test_json_round_trip(tmp_path):
    TABLE.write(tmp_path / "costs.json")
    found = json.loads((tmp_path / "costs.json").read_text())
    assert found == {
        "device": "card",
        "method": "eagle3",
        "rounds": {"1": {"0": 1.0, "2": 2.0, "4": 6.0}, "5": {"0": 3.0, "2": 4.0, "4": 10.0}},
    }
    assert CostTable.read(tmp_path / "costs.json") == CostTable.read(str(tmp_path / "costs.json")) == TABLE
    (tmp_path / "more.json").write_text(json.dumps(found | {"shape": "llama"}))
    assert CostTable.read(tmp_path / "more.json") == TABLE


def test_json_round_trip_with_budgets(tmp_path):
    table = CostTable("card", "eagle3", {4: {0: 1.0, 4: 3.0, (4, 8): 2.0}, 8: {0: 1.0, 4: 5.0, (4, 16): 3.0}})
    table.write(tmp_path / "costs.json")
    assert json.loads((tmp_path / "costs.json").read_text())["rounds"]["8"] == {"0": 1.0, "4": 5.0, "4/16": 3.0}
    assert CostTable.read(tmp_path / "costs.json") == table
    # Between batches and between budgets, by tokens for each request; the largest budget is every token.
    assert table.seconds(6, [(4, 12), (4, 21), 4]) == {(4, 12): 2.5, (4, 21): 3.25, 4: 4.0}


def test_json_round_trip_with_trees(tmp_path):
    tree = TreeShape(8, 4, 2)
    table = CostTable("card", "eagle3", {4: {0: 1.0, 4: 3.0, tree: 2.0}, 8: {0: 1.0, 4: 5.0, tree: 3.0}, 16: {0: 1.0}})
    table.write(tmp_path / "costs.json")
    assert json.loads((tmp_path / "costs.json").read_text())["rounds"]["8"] == {"0": 1.0, "4": 5.0, "8,4,2": 3.0}
    assert CostTable.read(tmp_path / "costs.json") == table
    assert table.seconds(6, [2, tree]) == {2: 2.5, tree: 2.5}
    for batch, other in [(6, TreeShape(8, 3, 2)), (12, tree)]:
        with pytest.raises(
            ValueError, match=r"costs has no rounds of batch \d+ with TreeShape\(.*: measure them, leave"
        ):
            table.seconds(batch, [other])
    (tmp_path / "costs.json").write_text((tmp_path / "costs.json").read_text().replace("8,4,2", "8,40,2"))
    with pytest.raises(ValueError, match=r"costs=.*ValueError: tree.depth=40: expected an integer"):
        CostTable.read(tmp_path / "costs.json")


def test_seconds_are_interpolated_linearly():
    assert TABLE.seconds(1, [0, 2, 4]) == ROUNDS[1]
    assert TABLE.seconds(2, [0, 1, 2, 3, 4]) == {0: 1.5, 1: 2.0, 2: 2.5, 3: 4.75, 4: 7.0}


@pytest.mark.parametrize(
    ("batch", "drafts", "words"),
    [
        (6, [0], "costs has batches 1..5: expected max_batch=6 among them"),
        (1, [0, 5], "costs has 0..4 drafts for batch 1: expected 5 among them; measure it, lower max_draft_tokens"),
    ],
)
def test_seconds_outside_of_the_measurements_are_refused(batch, drafts, words):
    with pytest.raises(ValueError, match=words):
        TABLE.seconds(batch, drafts)


@pytest.mark.parametrize(
    ("rounds", "words"),
    [
        ({}, r"rounds={}: expected"),
        ({0: {0: 1.0}}, "rounds=0: expected batch sizes of at least 1"),
        ({1: {}}, r"rounds\[1\]={}: expected seconds by K"),
        ({1: {-1: 1.0}}, r"rounds\[1\]=-1: expected numbers of drafts"),
        ({1: {0: 0.0}}, r"rounds\[1\]\[0\]=0.0: expected seconds, a positive number"),
        ({1: {0: float("nan")}}, r"rounds\[1\]\[0\]=nan: expected"),
        ({4: {4: 1.0, (4, 3): 1.0}}, r"rounds\[4\]=\(4, 3\): expected R of \(K, R\) between the batch and"),
        ({4: {4: 1.0, (4, 20): 1.0}}, r"rounds\[4\]=\(4, 20\): expected R"),
        ({4: {4: 1.0, (0, 4): 1.0}}, r"rounds\[4\]=\(0, 4\): expected R"),
        ({4: {(4, 8): 1.0}}, r"rounds\[4\]=.*expected seconds of some K without an R"),
    ],
)
def test_invalid_table_is_refused(rounds, words):
    with pytest.raises(ValueError, match=words):
        CostTable("card", "eagle3", rounds)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"device": 1, "method": "ngram", "rounds": {"1": {"0": 1}}}', '{"rounds": {"x": {}}}']
)
def test_invalid_table_file_is_refused(tmp_path, text):
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ValueError, match=r"costs=.*costs.json.*expected \{\"device\": str"):
        CostTable.read(tmp_path / "costs.json")
    with pytest.raises(ValueError, match=r"nowhere.*expected the path of a JSON file"):
        CostTable.read(tmp_path / "nowhere")
