"""The options of ``jspec serve`` and what they mean for ``jspec.load``."""

import argparse
import importlib.util
import json
import pathlib
import re

import pytest

import jspec
from jspec import cli
from jspec.commands.group_args import group_of
from jspec.commands.model_args import checkpoint_folder, loading_of, speculation_of
from jspec.serving.server import command
from jspec.serving.server.served_model import sampling_defaults


def args_of(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(["target", *argv])


DEFAULTS = {"max_batch": 64, "kv_cache_dtype": "auto", "activation_dtype": "auto", "max_waiting": 1024}
DEFAULTS |= {"reproducible": False, "prefix_cache": True, "generation_config": "auto"}
LOADING = [  # options, and the argument of ``jspec.load`` that they are
    ("--max-model-len 99", "max_len", 99),
    ("--max-num-seqs 3", "max_batch", 3),
    ("--dtype bfloat16", "dtype", "bfloat16"),
    ("--gpu-memory-utilization 0.5", "gpu_memory_utilization", 0.5),
    ("--num-gpu-blocks-override 7", "num_pages", 7),
    ("--block-size 16", "page_size", 16),
    ("--swap-space 1", "swap_space", 1.0),
    ("--snapshot-every 512", "snapshot_every", 512),
    ("--snapshot-space 0.5", "snapshot_space", 0.5),
    ("--kv-cache-dtype fp8", "kv_cache_dtype", "fp8"),
    ("--activation-dtype int8", "activation_dtype", "int8"),
    ("--max-waiting 5", "max_waiting", 5),
    ("--logprobs-mode processed_logprobs", "logprobs_mode", "processed_logprobs"),
    ("--ngram-corpus f", "ngram_corpus", "f"),
    ("--reproducible", "reproducible", True),
    ("--no-enable-prefix-caching", "prefix_cache", False),
    ("--generation-config vllm", "generation_config", "jspec"),
]


def test_loading_options_are_arguments_of_load():
    assert loading_of(args_of()) == DEFAULTS
    every = " ".join(options for options, _, _ in LOADING)
    assert loading_of(args_of(*every.split())) == {name: value for _, name, value in LOADING}


def test_group_options_are_arguments_of_jax_distributed():
    assert group_of(args_of()) is None
    seconds = {"heartbeat_timeout_seconds": 24, "shutdown_timeout_seconds": 30}
    for by in ((), ("environment",), ("ray",), ("ray", "--nnodes", "2")):
        assert group_of(args_of("--distributed", *by)) == seconds
    least = {"heartbeat_timeout_seconds": 4, "shutdown_timeout_seconds": 5}
    assert group_of(args_of("--distributed", "--lost-after", "5")) == least
    hosts = ("--node-rank", "1", "--master-addr", "first")
    wanted = {"coordinator_address": "first:29501", "num_processes": 2, "process_id": 1, **seconds}
    wanted["cluster_detection_method"] = "deactivate"
    assert group_of(args_of("--nnodes", "2", *hosts)) == wanted
    assert group_of(args_of("--nnodes", "1", "--node-rank", "0", "--master-addr", "first")) is None
    for options, message in (
        (("--nnodes", "2"), "node_rank=None: expected a value beside --nnodes"),
        (("--nnodes", "1", *hosts), r"node_rank=1: expected an integer in 0\.\.0"),
        (("--nnodes", "0", *hosts), "nnodes=0: expected a number of hosts, at least 1"),
        (("--nnodes", "2", *hosts, "--master-port", "0"), "master_port=0: expected an integer in"),
        (("--distributed", *hosts), "distributed='environment': expected it alone, without --node-rank and --master-"),
        (("--distributed", "ray", *hosts), "distributed='ray': expected it alone, without --node-rank and --master-"),
        (("--distributed", "ray", "--nnodes", "0"), "nnodes=0: expected a number of hosts, at least 1"),
        (("--distributed", "--lost-after", "4"), r"lost_after=4\.0: expected a number of seconds, at least 5"),
    ):
        with pytest.raises(ValueError, match=message):
            group_of(args_of(*options))


def test_speculation_from_single_options(tmp_path):
    assert speculation_of(args_of()) == (None, jspec.Speculation(), None)
    draft = str(tmp_path)
    options = ("--draft", draft, "--num-speculative-tokens", "3", "--verify", "match", "--draft-sampling", "coupled")
    expected = jspec.Speculation(num_draft_tokens=3, verify="match", draft_sampling="coupled")
    assert speculation_of(args_of(*options)) == (draft, expected, None)
    expected = jspec.Speculation(lookup=True)
    assert speculation_of(args_of("--draft", draft, "--lookup")) == (draft, expected, None)
    auto = speculation_of(args_of("--draft", "ngram", "--num-speculative-tokens", "auto"))
    assert auto == ("ngram", jspec.Speculation(num_draft_tokens="auto"), None)
    trees = [speculation_of(args_of("--draft", draft, "--tree", shape))[1] for shape in ("auto", "8,3,2", "16")]
    assert trees == [jspec.Speculation(tree=shape) for shape in ("auto", jspec.TreeShape(8, 3, 2), jspec.TreeShape(16))]
    plain = speculation_of(args_of("--num-speculative-tokens", "0"))
    assert plain == (None, jspec.Speculation(num_draft_tokens=0), None)


def config(**given):
    return speculation_of(args_of("--speculative-config", json.dumps(given)))


def test_speculation_from_vllms_json(tmp_path):
    draft = str(tmp_path)
    expected = jspec.Speculation(num_draft_tokens=5, draft_temperature=0.5)
    given = {"model": draft, "method": "eagle3", "num_speculative_tokens": 5, "draft_temperature": 0.5}
    assert config(**given) == (draft, expected, "eagle3")
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5, "prompt_lookup_min": 2}
    expected = jspec.Speculation(num_draft_tokens=3, ngram_max=5, ngram_min=2)
    assert config(**ngram) == ("ngram", expected, None)
    expected = jspec.Speculation(lookup=True, ngram_min=3)
    assert config(model=draft, lookup=True, prompt_lookup_min=3) == (draft, expected, None)
    for method in ("mtp", "deepseek_mtp", "glm4_moe_lite_mtp"):
        assert config(method=method, num_speculative_tokens=1) == ("mtp", jspec.Speculation(num_draft_tokens=1), None)
    assert speculation_of(args_of("--draft", "mtp"))[0] == "mtp"


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"model": "m", "num_spec_tokens": 3}, "speculative_config has no argument 'num_spec_tokens'; did you mean"),
        ({"num_speculative_tokens": 3}, r"speculative_config\.model=None: expected a checkpoint folder"),
        ({"model": "m", "method": "magic"}, r"speculative_config\.method='magic': expected one of"),
        ({"model": "m", "method": "ngram"}, r"speculative_config\.model='m': expected none"),
        ({"model": "m", "method": "deepseek_mtp"}, r"speculative_config\.model='m': expected none beside the method"),
        ({"model": "ngram", "num_speculative_tokens": -1}, "num_draft_tokens=-1: expected an integer"),
        ({"model": ".", "lookup": "yes"}, "lookup='yes': expected True or False"),
        ({"model": "m", "synthetic_acceptance": 1}, "has no argument 'synthetic_acceptance'"),
    ],
)
def test_bad_speculative_config_is_refused(given, error):
    with pytest.raises((ValueError, TypeError), match=error):
        config(**given)


def test_speculation_is_given_once():
    for text in ("[]", "{", "7"):
        with pytest.raises(ValueError, match="expected a JSON object"):
            speculation_of(args_of("--speculative-config", text))
    with pytest.raises(ValueError, match="expected it alone, without --num_draft_tokens"):
        speculation_of(args_of("--speculative-config", "{}", "--num-speculative-tokens", "3"))


def test_a_target_is_a_folder_or_in_the_hub_cache(tmp_path, monkeypatch):
    assert checkpoint_folder(str(tmp_path)) == str(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("nobody/nothing", "../../absent", "no such: name"):
        with pytest.raises(
            ValueError, match=r"is no folder, and the local hub cache has no such model: .* hf download"
        ):
            checkpoint_folder(name)
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "snapshots" / commit / "config.json").write_text("{}")
    assert checkpoint_folder("someone/model") == str(repository / "snapshots" / commit)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--api-key", ""], "api_key='(hidden)'"),
        (["--port", "70000"], "port=70000"),
        (["--shutdown-timeout", "-1"], "shutdown_timeout=-1.0"),
        (["--max-n", "0"], "max_n=0"),
        (["--chat-template", "nowhere"], "chat_template='nowhere'"),
        (["--template-kwargs", "mood", "messages"], "template_kwargs='messages': expected names of variables"),
        (["--default-chat-template-kwargs", '{"tokenize": true}'], "default_chat_template_kwargs='tokenize': expected"),
        (["--ssl-certfile", "nowhere"], "ssl_certfile='nowhere'"),
        (["--num-speculative-tokens", "3"], "num_speculative_tokens=3: expected --draft"),
        (["--lookup"], "lookup=True: expected --draft"),
        (["--host", "no such host"], "host='no such host'"),
        (["--draft", "nobody/nothing"], "or --download (download=True)"),
    ],
)
def test_bad_options_are_refused_before_loading(options, error, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jspec.api.load", None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert cli.main(["serve", str(tmp_path), *options]) == 2
    message = capsys.readouterr().err
    assert message.startswith("jspec serve: ")
    assert error in message
    assert "expected" in message


def test_taken_port_is_reported(tmp_path, capsys):
    from jspec.serving.http.server import listener

    with listener("127.0.0.1", 0) as bound:
        bound.listen()
        port = str(bound.getsockname()[1])
        assert cli.main(["serve", str(tmp_path), "--port", port]) == 2
    assert f"port={port}: expected a free port" in capsys.readouterr().err


def test_a_port_belongs_to_the_first_that_takes_it():
    """A server that still loads its model keeps its port, though it does not listen yet."""
    from jspec.serving.http.server import listener

    with listener("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        with pytest.raises(ValueError, match=f"port={port}: expected a free port of '127.0.0.1'"):
            listener("127.0.0.1", port)
    listener("127.0.0.1", port).close()


def test_the_guide_has_every_option():
    parser = argparse.ArgumentParser(add_help=False)
    command.add_arguments(parser)
    every = [option for action in parser._actions for option in action.option_strings]
    options = {option for option in every if option.startswith("--")}
    assert set(every) - options == {"-tp"}
    guide = (pathlib.Path(__file__).parents[3] / "docs" / "guides" / "server.md").read_text()
    assert set(re.findall(r"`(--[a-z-]+)", guide)) >= options


def test_missing_packages_are_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("uvicorn", "pydantic") else name)
    assert cli.main(["serve", str(tmp_path)]) == 2
    assert "uvicorn, pydantic not installed" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "aiohttp" else name)
    assert cli.main(["serve", str(tmp_path), "--distributed"]) == 2
    assert "aiohttp not installed: expected what pip install 'jspec[serve]' installs" in capsys.readouterr().err


def test_defaults_of_sampling_are_named_with_their_values():
    said = sampling_defaults(jspec.SamplingParams(temperature=0.7, top_k=20, repetition_penalty=1.1))
    assert "temperature=0.7, top_k=20, repetition_penalty=1.1, so that temperature 0 is not the argmax" in said
    assert "argmax" not in sampling_defaults(jspec.SamplingParams(temperature=0.7))
    assert "jspec's default" in sampling_defaults(jspec.SamplingParams())
