"""Many streamed requests over HTTP, which all want something else, some of which leave; and the server after them."""

import asyncio

import numpy as np
import pytest
from server_process import DRAFTS, serving

from benchmarks.soak.streams import alone, check, settled, soak, until

CLIENTS = 14  # at a time: more than decode and wait together, so that some are refused
ALONE = 30  # answers that are asked for again, alone


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (100, ()),
        # Pages for few of the texts, so that requests are preempted as well.
        pytest.param(2_000, ("--num-gpu-blocks-override", "10"), marks=pytest.mark.long),
    ],
)
def test_every_request_ends_and_nothing_is_left_behind(tmp_path, count, options):
    rng = np.random.default_rng(count)
    with serving(tmp_path, *DRAFTS, *options) as (process, address):
        first = asyncio.run(soak(address, rng, count // 4, CLIENTS))
        before, memory, files = settled(address), process.memory_info().rss, process.num_fds()
        ended = first + asyncio.run(soak(address, rng, count - count // 4, CLIENTS))
        after = settled(address)
        check(ended, ("answered", "400", "429", "left", "late"))

        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert after[f"vllm:{name}"] == 0, name
        assert after["jspec:num_pages_swapped"] == 0
        assert after["jspec:num_compilations_total"] == before["jspec:num_compilations_total"]
        assert (after["vllm:num_preemptions_total"] > 0) == bool(options)
        until(lambda: process.num_fds() <= files, "files or connections are open that were not before")
        assert process.memory_info().rss < memory + 64 * 2**20

        whole = [(asked, answer) for asked, became, answer in ended if became == "answered"][-ALONE:]
        again = asyncio.run(alone(address, [asked for asked, _ in whole]))
        assert again == [("answered", answer) for _, answer in whole]
        assert "Traceback" not in (tmp_path / "log").read_text()
