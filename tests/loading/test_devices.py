"""``devices`` and ``mesh`` of ``jspec.load``: a model lies where it is told to, and nowhere else."""

import gc
import threading
from typing import Any

import jax
import numpy as np
import pytest

import jspec
from jspec.commands.demo import FAMILY

SMALL = {"max_batch": 2, "max_len": 96, "page_size": 16, "num_draft_tokens": 3, "dtype": "float32"}
PROMPTS = ["def add(a, b):\n", "import os\n\nfor name in"]


def texts(llm) -> list[list[int]]:
    return [result.token_ids for result in llm.generate(PROMPTS, temperature=0.8, seed=3, max_tokens=16)]


def loaded(draft="draft", **more) -> jspec.LLM:
    return jspec.load(FAMILY / "target", draft if draft == "ngram" else FAMILY / draft, **SMALL, **more)


def occupied() -> dict[Any, int]:
    """How many arrays each device has."""
    gc.collect()
    found: dict[Any, int] = {}
    for leaf in jax.live_arrays():
        for device in leaf.devices():
            found[device] = found.get(device, 0) + 1
    return found


@pytest.mark.parametrize("draft", ["draft", "eagle3", "ngram"])
def test_a_model_on_another_device(draft):
    before, device = occupied(), jax.devices()[2]
    with loaded(draft, devices=[device]) as llm:
        elsewhere = {other: count for other, count in occupied().items() if other != device}
        assert elsewhere == {other: count for other, count in before.items() if other != device}
        found: list = []
        other = threading.Thread(target=lambda: found.append(texts(llm)))
        other.start()
        other.join()
        logits = llm.logits([1, 2, 3])
        assert logits.devices() == {device}
        assert {leaf.device for leaf in jax.tree.leaves(llm.engine.runner.batch.state)} == {device}
        llm.sleep()
        llm.wake_up()
        assert {leaf.device for leaf in jax.tree.leaves(llm.engine.runner.batch.leaves)} == {device}
        assert [texts(llm)] == found
        assert {other: count for other, count in occupied().items() if other != device} == elsewhere
    with loaded(draft) as usual:
        assert [texts(usual)] == found
        assert np.array_equal(usual.logits([1, 2, 3]), np.array(logits))


def test_shards_on_the_devices_in_their_order():
    devices, before = [jax.devices()[3], jax.devices()[1]], occupied()
    with loaded("draft", tensor_parallel=2) as usual:
        expected = texts(usual)
    for where in ({"devices": devices}, {"mesh": jax.sharding.Mesh(np.array(devices), ("any",))}):
        with loaded("draft", tensor_parallel=2, **where) as llm:
            assert list(llm.engine.runner.batch.sharding.mesh.devices.flat) == devices
            assert texts(llm) == expected
            elsewhere = {device for device in occupied() if device not in (*devices, jax.devices()[0])}
            assert all(occupied()[device] <= before[device] for device in elsewhere)
            leaves = jax.tree.leaves((llm.engine.runner.batch.leaves, llm.engine.runner.batch.state))
            assert all(leaf.devices() == set(devices) for leaf in leaves)


@pytest.mark.parametrize(
    ("where", "error", "words"),
    [
        ({"devices": "cpu"}, ValueError, "devices='cpu': expected a list of jax.Device"),
        ({"devices": [0]}, ValueError, r"devices=\[0\]: expected a list of jax.Device"),
        ({"devices": [1, 2]}, ValueError, "devices has 2 devices: expected 1, .*; load with tensor_parallel=2"),
        (
            {"devices": [1], "tensor_parallel": 2},
            ValueError,
            "devices has 1 devices: expected 2, which is tensor_parallel",
        ),
        ({"devices": [], "tensor_parallel": 1}, ValueError, "devices has 0 devices: expected 1"),
        ({"devices": [1, 1], "tensor_parallel": 2}, ValueError, "expected each device once"),
        ({"mesh": "tp"}, ValueError, "mesh='tp': expected a jax.sharding.Mesh"),
        ({"devices": [1], "mesh": "tp"}, TypeError, "'devices' and 'mesh' both say where the model lies"),
    ],
)
def test_devices_that_are_refused(where, error, words):
    every = jax.devices()
    if isinstance(where.get("devices"), list) and where["devices"] != [0]:
        where = where | {"devices": [every[i] for i in where["devices"]]}
    with pytest.raises(error, match=words):
        loaded(**where)
