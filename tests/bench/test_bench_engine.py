"""``jspec bench latency`` and ``jspec bench throughput``: the requests that they send, and the figures that they report."""

import json
import time

import jax
import pytest
from openai_server import family

import jspec
from jspec import cli
from jspec.commands.demo import FAMILY

MODEL = [str(FAMILY / "target"), "--draft", str(FAMILY / "draft"), "--num-speculative-tokens", "3"]


@pytest.fixture(autouse=True)
def loaded(monkeypatch):
    """Arguments of ``jspec.load``, which returns a model that is compiled already."""
    calls, model = [], family()

    def load(*args, **options):
        calls.append((args, options))
        return model

    monkeypatch.setattr(jspec, "load", load, raising=False)
    return calls


def test_latency_measures_each_iteration(loaded, capsys, tmp_path):
    file = tmp_path / "latency.json"
    sizes = [
        "--batch-size",
        "3",
        "--input-len",
        "7",
        "--output-len",
        "9",
        "--num-iters",
        "4",
        "--num-iters-warmup",
        "1",
    ]
    before = family().engine.metrics()
    options = ["--temperature", "0", "--dtype", "float32", "--output-json", str(file)]
    assert cli.main(["bench", "latency", *MODEL, *sizes, *options]) == 0
    after = family().engine.metrics()
    assert after.num_finished - before.num_finished == 3 * 5
    assert after.num_generation_tokens - before.num_generation_tokens == 3 * 5 * 9
    assert after.num_prompt_tokens - before.num_prompt_tokens == 3 * 5 * 7
    ((args, load),) = loaded
    assert args == (MODEL[0], MODEL[2])
    assert (load["max_batch"], load["dtype"]) == (3, "float32")
    assert load["speculation"] == jspec.Speculation(num_draft_tokens=3)
    out = capsys.readouterr().out
    result = json.loads(file.read_text())
    assert f"Avg latency: {result['avg_latency']} seconds" in out
    assert f"99% percentile latency: {result['percentiles']['99']} seconds" in out
    assert len(result["latencies"]) == 4
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 4)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["percentiles"]["50"] == pytest.approx(sum(sorted(result["latencies"])[1:3]) / 2)
    assert (result["method"], result["device"]) == ("draft_model", jax.devices()[0].device_kind)
    assert result["sampling"]["temperature"] == 0


def test_throughput_counts_requests_and_tokens(capsys, tmp_path):
    file = tmp_path / "throughput.json"
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"import {name}\n"}) + "\n" for name in ("os", "sys", "json")))
    before = family().engine.metrics()
    options = [
        "--dataset-name",
        "custom",
        "--dataset-path",
        str(data),
        "--num-prompts",
        "5",
        "--custom-output-len",
        "6",
    ]
    assert cli.main(["bench", "throughput", *MODEL, *options, "--ignore-eos", "--output-json", str(file)]) == 0
    after = family().engine.metrics()
    assert after.num_generation_tokens - before.num_generation_tokens == 5 * 6
    result = json.loads(file.read_text())
    assert result["num_requests"] == 5
    assert result["total_output_tokens"] == 30
    assert result["total_num_tokens"] == 30 + after.num_prompt_tokens - before.num_prompt_tokens
    assert result["requests_per_second"] == pytest.approx(5 / result["elapsed_time"])
    assert result["tokens_per_second"] == pytest.approx(result["total_num_tokens"] / result["elapsed_time"])
    assert 1 <= result["acceptance_length"] <= 4
    out = capsys.readouterr().out
    assert f"Throughput: {result['requests_per_second']:.2f} requests/s" in out
    assert f"Total num output tokens:  {30}" in out


class Interrupted:
    """A function that raises KeyboardInterrupt from its n-th call on."""

    def __init__(self, function, calls: int):
        self._function, self._left = function, calls

    def __call__(self, *args, **options):
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt
        return self._function(*args, **options)


@pytest.mark.parametrize(("calls", "message"), [(1, "before anything was measured"), (3, "after 2 of 30 iterations")])
def test_ctrl_c_ends_latency(calls, message, monkeypatch, capsys):
    monkeypatch.setattr(jspec, "generate", Interrupted(jspec.generate, calls), raising=False)
    sizes = ["--batch-size", "1", "--input-len", "3", "--output-len", "2", "--num-iters-warmup", "1"]
    assert cli.main(["bench", "latency", *MODEL, *sizes]) == 130
    out, err = capsys.readouterr()
    assert f"interrupted {message}" in err
    assert ("Avg latency" in out) == (calls == 3)


@pytest.mark.parametrize(("calls", "message"), [(0, "before any prompt was completed"), (2, "when 2 of 6 prompts")])
def test_ctrl_c_ends_throughput(calls, message, monkeypatch, capsys):
    engine = family().engine
    monkeypatch.setattr(engine.frontend, "result", Interrupted(engine.frontend.result, calls))
    options = ["--num-prompts", "6", "--random-input-len", "5", "--random-output-len", "3"]
    assert cli.main(["bench", "throughput", *MODEL, *options]) == 130
    out, err = capsys.readouterr()
    assert f"interrupted {message}" in err
    assert ("Throughput" in out) == (calls == 2)
    deadline = time.monotonic() + 20  # the engine's thread cancels the requests at its next step
    while (metrics := engine.metrics()).pages_used and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (metrics.num_running, metrics.num_waiting, metrics.pages_used) == (0, 0, 0)


def test_latency_never_repeats_a_prompt(monkeypatch):
    seen = []
    monkeypatch.setattr(jspec, "generate", lambda _, prompts, params: seen.append((prompts, params)), raising=False)
    args = ["--batch-size", "2", "--num-iters", "3", "--num-iters-warmup", "0", "--output-len", "5", "--seed", "4"]
    assert cli.main(["bench", "latency", *MODEL, *args]) == 0
    assert len({tuple(prompt) for prompts, _ in seen for prompt in prompts}) == 6
    assert [request.seed for request in seen[0][1]] == [4, 5]
    assert all(request.ignore_eos and request.max_tokens == 5 for _, params in seen for request in params)


@pytest.mark.parametrize(
    ("command", "options", "error"),
    [
        ("latency", ["--batch-size", "0"], "batch_size=0: expected"),
        ("latency", ["--input-len", "0"], "input_len=0: expected"),
        ("latency", ["--output-len", "-1"], "output_len=-1: expected"),
        ("latency", ["--num-iters", "0"], "num_iters=0: expected"),
        ("latency", ["--num-iters-warmup", "-1"], "num_iters_warmup=-1: expected"),
        ("latency", ["--seed", "-1"], "seed=-1: expected"),
        ("latency", ["--input-len", "9999"], "prompt 0 has 9999 tokens"),
        ("throughput", ["--num-prompts", "0"], "num_prompts=0: expected"),
        ("throughput", ["--temperature", "-1"], "temperature=-1.0: expected"),
    ],
)
def test_bad_options_are_refused(command, options, error, capsys):
    assert cli.main(["bench", command, *MODEL, *options]) == 2
    message = capsys.readouterr().err
    assert message.removeprefix("jspec bench: compiling\n").startswith("jspec bench: ")
    assert error in message
