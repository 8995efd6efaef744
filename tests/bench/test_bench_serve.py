"""``jspec bench serve`` from its options to its files and exit codes, against a server that may fail."""

import argparse
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from fake_server import PAUSE, fake_server, page

from jspec import cli
from jspec.bench import serve_command

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def server():
    with fake_server() as fake:
        yield fake


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"prompt {i}"}) + "\n" for i in range(5)))
    return file


def arguments(server, prompts, *options: str) -> list[str]:
    data = ["--dataset-name", "custom", "--dataset-path", str(prompts)]
    return ["bench", "serve", "--base-url", server.url, *data, *options]


def line(out: str, label: str) -> str:
    return re.search(rf"^{re.escape(label)} +(\S.*)$", out, re.MULTILINE)[1]


def test_run_prints_a_report_and_writes_its_files(server, prompts, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")
    options = ["--num-prompts", "7", "--max-concurrency", "4", "--temperature", "0.7", "--top-k", "5", "--ignore-eos"]
    options += ["--extra-body", '{"seed": 3}', "--goodput", "ttft:10000", "tpot:1", "--label", "a label"]
    options += ["--metadata", "card=none", "--save-detailed", "--result-dir", str(tmp_path / "new" / "folder")]
    options += ["--custom-output-len", "8", "--num-warmups", "2", "--plot", str(tmp_path / "run.svg")]
    assert cli.main(arguments(server, prompts, *options)) == 0
    out, err = capsys.readouterr()
    assert line(out, "Successful requests:") == "7"
    assert line(out, "Total generated tokens:") == "42"
    assert line(out, "Request goodput (req/s):") == "0.00"
    assert line(out, "Tokens per chunk:") == "2.00"
    assert line(out, "Fields of each request:").startswith("temperature=0.7, top_k=5, ignore_eos=true, seed=3")
    assert "Speculative Decoding" not in out
    assert len(server.bodies) == 9
    assert {**server.bodies[0], "prompt": ""} == {
        **{"model": "sound", "prompt": "", "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}},
        **{"temperature": 0.7, "top_k": 5, "ignore_eos": True, "seed": 3},
    }
    (file,) = (tmp_path / "new" / "folder").iterdir()
    assert str(file) in err
    assert re.fullmatch(r"a label-infqps-concurrency4-sound-\d{8}-\d{6}\.json", file.name)
    result = json.loads(file.read_text())
    assert {name: result[name] for name in ("backend", "label", "card", "request_rate", "max_concurrency")} == {
        **{"backend": "openai", "label": "a label", "card": "none", "request_rate": "inf", "max_concurrency": 4}
    }
    assert (result["completed"], result["failed"], result["interrupted"]) == (7, 0, False)
    assert result["mean_tpot_ms"] == pytest.approx(1000 * 2 * PAUSE / 5, rel=0.4)
    assert result["median_itl_ms"] == pytest.approx(1000 * PAUSE, rel=0.4)
    assert result["p99_e2el_ms"] >= result["mean_e2el_ms"] > 3000 * PAUSE * 0.9
    assert result["output_lens"] == [6] * 7
    assert len(result["itls"][0]) == 2
    assert len(result["ttfts"]) == len(result["latencies"]) == len(result["start_times"]) == 7
    assert set(result["generated_texts"]) == {"one two three"}
    assert set(result["errors"]) == {""}
    assert (tmp_path / "run.svg").read_text().startswith("<?xml")


def test_speculation_is_the_growth_of_the_counters(server, prompts, capsys, tmp_path):
    server.pages = [page(10, 30, 15, [9, 4, 2]), page(30, 90, 45, [25, 13, 7])]
    options = ["--num-prompts", "3", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    options += ["--num-warmups", "2"]
    assert cli.main(arguments(server, prompts, *options)) == 0
    out = capsys.readouterr().out
    assert line(out, "Acceptance rate (%):") == "50.00"
    assert line(out, "Acceptance length:") == "2.50"
    assert line(out, "Drafts:") == "20"
    assert line(out, "  Position 2:") == "25.00"
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["spec_decode_acceptance_length"] == 2.5
    assert result["spec_decode_per_position_acceptance_rates"] == [0.8, 0.45, 0.25]
    assert "errors" not in result
    assert server.looks == [2, 5]  # behind the requests before the measurement, and behind the measurement


def test_failures_are_counted_and_printed(server, prompts, capsys):
    bad = json.dumps({"prompt": "the bad one"})
    prompts.write_text(f"{prompts.read_text()}{bad}\n{bad}\n")
    assert cli.main(arguments(server, prompts, "--num-prompts", "7")) == 0
    out, err = capsys.readouterr()
    assert (line(out, "Successful requests:"), line(out, "Failed requests:")) == ("5", "2")
    assert 'jspec bench serve: 2 requests failed, the first with: HTTP 500: {"error"' in err
    assert cli.main(arguments(server, prompts, "--num-prompts", "2", "--model", "cut")) == 1
    out, err = capsys.readouterr()
    assert line(out, "Failed requests:") == "2"
    assert line(out, "Mean TTFT (ms):") == "-"
    assert cli.main(arguments(server, prompts, "--model", "500", "--num-warmups", "1")) == 2
    assert "a request before the measurement failed: HTTP 500" in capsys.readouterr().err


def test_tokenizer_counts_tokens_that_the_server_does_not(server, prompts, capsys):
    assert cli.main(arguments(server, prompts, "--model", "no usage", "--num-prompts", "2")) == 1
    assert "does not report how many tokens a response has: give --tokenizer" in capsys.readouterr().err
    family = str(ROOT / "jspec" / "demo_models" / "target")
    options = ["--model", "no usage", "--num-prompts", "2", "--tokenizer", family]
    assert cli.main(arguments(server, prompts, *options)) == 0
    out = capsys.readouterr().out
    assert int(line(out, "Total generated tokens:")) >= 2 * 3
    assert int(line(out, "Total input tokens:")) > 2


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--port", "9"], "no server answers at http://127.0.0.1:9 (Cannot connect"),
        (["--port", "0"], "port=0: expected"),
        (["--base-url", "localhost:8000"], "base_url='localhost:8000': expected http://"),
        (["--base-url", "http://a/v1"], "base_url='http://a/v1': expected http://a, because"),
        (["--header", "a"], "header='a': expected KEY=VALUE"),
        (["--extra-body", "[]"], "extra_body='[]': expected a JSON object"),
        (["--request-rate", "0"], "request_rate=0.0: expected"),
        (["--burstiness", "-1"], "burstiness=-1.0: expected"),
        (["--max-concurrency", "0"], "max_concurrency=0: expected"),
        (["--num-prompts", "0"], "num_prompts=0: expected"),
        (["--num-warmups", "-1"], "num_warmups=-1: expected"),
        (["--seed", "-1"], "seed=-1: expected"),
        (["--goodput", "speed:1"], "goodput='speed:1': expected"),
        (["--metadata", "card"], "metadata='card': expected KEY=VALUE"),
        (["--plot", "run.txt"], "plot='run.txt': expected a file whose name ends with .png"),
        (["--plot", "nowhere/run.png"], "plot='nowhere/run.png': expected a file in a folder that exists"),
        (["--dataset-name", "custom"], "dataset_name='custom': expected --dataset-path"),
        (["--dataset-path", "f"], "dataset_path='f': expected none"),
        (["--random-input-len", "0"], "random_input_len=0: expected"),
        (["--dataset-name", "sharegpt", "--dataset-path", "f", "--sharegpt-output-len", "0"], "sharegpt_output_len=0"),
        (["--dataset-name", "spec_bench", "--dataset-path", "f", "--spec-bench-output-len", "0"], "output_len=0"),
        (["--dataset-name", "custom", "--dataset-path", "f", "--custom-output-len", "0"], "custom_output_len=0"),
    ],
)
def test_bad_options_are_refused(options, error, capsys):
    assert cli.main(["bench", "serve", *options]) == 2
    message = capsys.readouterr().err
    assert message.startswith("jspec bench: ")
    assert error in message
    assert "expected" in message


def test_refused_api_key_and_unknown_tokenizer_are_reported(server, prompts, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    assert cli.main(arguments(server, prompts)) == 2
    assert "expected its API key in OPENAI_API_KEY" in capsys.readouterr().err
    monkeypatch.delenv("OPENAI_API_KEY")
    assert cli.main(["bench", "serve", "--base-url", server.url, "--num-prompts", "1"]) == 2
    assert "tokenizer='sound': expected --tokenizer with a checkpoint folder" in capsys.readouterr().err


def test_waits_for_a_server_that_is_not_ready(prompts, capsys):
    with fake_server() as stopped:
        pass
    began = time.monotonic()
    assert cli.main(arguments(stopped, prompts, "--ready-check-timeout-sec", "0.7")) == 2
    assert time.monotonic() - began >= 0.7
    assert "no server answers" in capsys.readouterr().err


@contextlib.contextmanager
def bench(server, prompts, *options: str):
    command = [sys.executable, "-m", "jspec.cli", *arguments(server, prompts, *options)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, **streams) as process:
        try:
            yield process
        finally:
            process.kill()


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ctrl_c_reports_the_responses_so_far(server, prompts):
    with bench(server, prompts, "--num-prompts", "1000", "--request-rate", "20") as process:
        until(lambda: len(server.bodies) > 10)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert int(line(out, "Successful requests:")) >= 3
    assert re.search(r"interrupted when \d+ of 1000 requests had ended\n$", err)
    assert "Traceback" not in err
    until(lambda: server.under_way == 0)


def test_ctrl_c_before_the_first_response_exits_with_130(server, prompts):
    with bench(server, prompts, "--model", "stuck") as process:
        until(lambda: server.bodies)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert err == "jspec bench serve: interrupted before any request ended; nothing was measured\n"


def test_missing_packages_are_reported(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "aiohttp" else name)
    assert cli.main(["bench", "serve"]) == 2
    assert "aiohttp not installed: expected what pip install 'jspec[bench]' installs" in capsys.readouterr().err


def test_the_guide_has_every_option():
    from jspec.bench.engine_options import add_latency_options, add_throughput_options

    guide = (ROOT / "docs" / "guides" / "benchmarking.md").read_text()
    server = (ROOT / "docs" / "guides" / "server.md").read_text()
    documented = set(re.findall(r"`(--[a-z0-9-]+)", guide + server))
    for add in (serve_command.add_arguments, add_latency_options, add_throughput_options):
        parser = argparse.ArgumentParser(add_help=False)
        add(parser)
        every = (option for action in parser._actions for option in action.option_strings)
        assert documented >= {option for option in every if option.startswith("--")}
