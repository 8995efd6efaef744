"""Costs of rounds are measured once, cached beside executables, and read by later processes."""

import json

import jax
import pytest
from engines import CONFIG, bigram, drafting, successor_table

from jspec.config import Speculation
from jspec.engine.aot_cache.costs import cached_or_measured
from jspec.engine.decoding import Decoding
from jspec.engine.engine import Engine
from jspec.engine.runner import round_costs

BUCKETS, LENGTHS = (1, 4), (0, 2)
SECONDS = {1: {0: 1.0, 2: 1.5}, 4: {0: 2.0, 2: 2.5}}


@pytest.fixture
def folder(left_to_the_next_start):
    return left_to_the_next_start


class Measurements:
    """Counts them."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return SECONDS


def costs(measure, what="eagle", buckets=BUCKETS, lengths=LENGTHS):
    return cached_or_measured(what, "eagle", dict.fromkeys(buckets, lengths), measure)


def test_second_process_reads_cached_costs(folder):
    measure = Measurements()
    assert costs(measure) == costs(measure) == SECONDS
    assert measure.count == 1
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("other", [{"what": "medusa"}, {"buckets": (1, 4, 16)}, {"lengths": (0, 1, 2)}], ids=str)
def test_costs_of_another_key_are_not_read(folder, other):
    measure = Measurements()
    costs(measure)
    costs(measure, **other)
    assert measure.count == 2


@pytest.mark.parametrize("damaged", ["", "{", "[]", '{"device": "x", "method": "y", "rounds": {"1": {"0": -1}}}'])
def test_a_damaged_file_is_measured_again_and_replaced(folder, damaged):
    measure = Measurements()
    costs(measure)
    (file,) = folder.iterdir()
    whole = file.read_text()
    file.write_text(damaged)
    assert costs(measure) == SECONDS
    assert measure.count == 2
    assert json.loads(file.read_text()) == json.loads(whole)


@pytest.mark.parametrize("where", [None, "gs://bucket/cache"])
def test_without_a_local_folder_nothing_is_cached(folder, where):
    jax.config.update("jax_compilation_cache_dir", where)
    measure = Measurements()
    assert costs(measure) == costs(measure) == SECONDS
    assert measure.count == 2


def test_unwritable_folder_means_measuring_again(folder):
    jax.config.update("jax_compilation_cache_dir", str(folder / "absent"))
    measure = Measurements()
    assert costs(measure) == SECONDS


def test_engine_reads_the_costs_of_an_earlier_one(folder, monkeypatch):
    settings = Speculation("auto", max_draft_tokens=2)
    table = bigram(successor_table())

    def controller():
        make = drafting("draft_model", settings)
        engine = Engine(table, table, Decoding(make, "match", draft_lengths=settings.draft_lengths), CONFIG)
        engine.warmup()
        return engine.loop.controller

    first = controller()
    monkeypatch.setattr(round_costs, "measured", lambda *_: pytest.fail("measured again"))
    assert controller().seconds == first.seconds
