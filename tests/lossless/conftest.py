"""How a run is set up: its checks are counted together, in however many processes (pytest-xdist) it makes them."""

import os

import pytest

from jspec.pallas.delta_net import chunked
from lossless import statistics, table_model


@pytest.fixture(scope="session", autouse=True)
def counted_together(tmp_path_factory):
    own = tmp_path_factory.getbasetemp()  # of a process, inside that of the run
    statistics.made = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "checks"


@pytest.fixture(scope="session", autouse=True)
def logits_as_asked(request):
    table_model.LOGITS = request.config.getoption("--logits")


@pytest.fixture(scope="session", autouse=True)
def chunks_of_few_tokens():
    """Thousands of prompts of three tokens are not filled up to 64 each where gated delta nets read them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "CHUNK", 4)
        yield


@pytest.fixture(scope="class")
def played(request, run):
    """What a run of a ``Losslessness`` class did: an oracle and a tally for each ask."""
    return request.cls.with_oracles(run.program, request.cls.play(run))
