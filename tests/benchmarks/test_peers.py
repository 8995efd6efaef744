"""Both sides of ``benchmarks.peers`` have one shape, and what they say ends in a result and in tables."""

import dataclasses
import json
import re
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoConfig

from benchmarks.peers import __main__ as peers
from benchmarks.peers import children, folders, of_jspec
from benchmarks.peers.children import Side
from benchmarks.peers.of_vllm import SETTLING
from benchmarks.peers.rows import ROWS
from benchmarks.report import peers_table, results
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.huggingface.config import read_config, read_fields
from jspec.checkpoints.quantized.config import read_quantization
from jspec.checkpoints.tensors.names import tensor_table

STAND_IN = '''
"""As much of vLLM as of_vllm.py uses. Each step reads one prompt, and then gives the rows before it a token each."""
import sys, time
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

__version__ = "0.99"

@dataclass
class SpeculativeConfig:
    synthetic_acceptance_rates: list

@dataclass
class EngineArgs:
    language_model_only: bool

class SamplingParams(SimpleNamespace):
    pass

class LLM:
    def __init__(self, model, speculative_config=None, **options):
        if speculative_config is not None:
            print("RuntimeError: no kernel for this", file=sys.stderr)
            raise RuntimeError("Engine core initialization failed. See root cause above.")
        assert options["load_format"] == "dummy" and options["language_model_only"]
        self.llm_engine, self.waiting, self.running = self, [], {}

    def add_request(self, request, prompt, sampling):
        assert len(prompt["prompt_token_ids"]) == 32 and sampling.output_kind == "delta"
        self.waiting.append((request, sampling.max_tokens))

    def has_unfinished_requests(self):
        return self.waiting or self.running

    def step(self):
        print("a line that is no JSON")
        time.sleep(0.002)
        self.running |= dict([self.waiting.pop(0)]) if self.waiting else {}
        outputs = [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7])]) for _ in self.running]
        self.running = {request: left - 1 for request, left in self.running.items() if left > 1}
        return outputs

for name, content in {
    "config": {"SpeculativeConfig": SpeculativeConfig},
    "engine": {},
    "engine.arg_utils": {"EngineArgs": EngineArgs},
    "sampling_params": {"RequestOutputKind": SimpleNamespace(DELTA="delta")},
}.items():
    sys.modules[f"vllm.{name}"] = ModuleType(name)
    vars(sys.modules[f"vllm.{name}"]).update(content)
'''


SUMMARIES = {
    "int4": "four bits with a scale for each 128 input features",
    "fp8": "FP8 with a scale for each output channel",
    "fp8_block": "FP8 with a scale for each block of 128 x 128",
    "nvfp4": "NVFP4, four bits with a scale for each 16 input features",
}


@pytest.mark.parametrize("name", ROWS)
def test_both_sides_of_a_row_have_one_shape(tmp_path, name):
    row, shape = ROWS[name], ROWS[name].shape
    model = children.vllm_job(tmp_path, row, [1])["model"]
    read = read_config(Folder(model))
    assert dataclasses.replace(read, quantization=None, other_formats=()) == everywhere(shape)
    config = AutoConfig.from_pretrained(model)
    text = config.get_text_config()
    sizes = text.num_hidden_layers, text.hidden_size, text.num_attention_heads, text.num_key_value_heads, text.head_dim
    assert sizes == (shape.num_layers, shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim)
    if shape.experts is not None:
        count = getattr(text, "num_experts", None) or text.num_local_experts
        assert (count, text.num_experts_per_tok) == (shape.experts.count, shape.experts.chosen)
    assert text.vocab_size == shape.vocab_size
    assert hasattr(config, "quantization_config") == (row.stored is not None or name == "gpt-oss-20b")
    if row.stored is not None:
        stored = read_quantization(read_fields(Folder(model)))
        assert stored is not None
        assert stored.summary.startswith(SUMMARIES[row.stored])


def everywhere(shape):
    """``shape``, with its mixture said of every layer where its class has experts in some."""
    if shape.architecture != "Qwen3MoeForCausalLM":
        return shape
    return dataclasses.replace(shape, experts=dataclasses.replace(shape.experts, layers=(True,) * shape.num_layers))


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.stored])
def test_both_sides_quantise_the_same_maps(name):
    target, fields = ROWS[name].target, folders.quantization_fields(ROWS[name])
    quantised = target.stored_params()
    plain = {
        tensor.removesuffix(".weight")
        for tensor, at in tensor_table(target).items()
        if len(at.shape) > 1 and at.param not in quantised and at.param != "embedding"
    }
    said = [said.replace(".language_model", "") for said in fields.get("ignore") or fields["modules_to_not_convert"]]
    pattern = re.compile("|".join(one.removeprefix("re:") if one.startswith("re:") else re.escape(one) for one in said))
    assert [one for one in plain if not pattern.match(one)] == []
    used = [one for one in said if not one.startswith(("mtp.", "re:"))]
    assert [one for one in used if not any(name.startswith(one) for name in plain)] == []


@pytest.fixture
def python_with_vllm(tmp_path, monkeypatch):
    """An interpreter for which the stand-in is vLLM."""
    (tmp_path / "vllm.py").write_text(STAND_IN)
    (tmp_path / "torch.py").write_text("__version__ = '9'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return sys.executable


def ours(name, batches, seconds, log, bandwidth=None):
    """jspec's side of a row, which has no room for the last number of rows."""
    about = dataclasses.asdict(results.begin("peers", {}, 1e12, {}))
    figures = {rows: {"ms": 1.0 + rows, "floor": 1.0, "tokens": 1.0} for rows in batches[:-1]}
    return Side(about, figures, {batches[-1]: "no room"})


def test_a_run_ends_in_a_result_and_a_table(tmp_path, monkeypatch, capsys, python_with_vllm):
    """Drafts fail in this vLLM, which costs its side of that row alone."""
    monkeypatch.setattr(peers, "jspec_side", ours)
    options = ["--vllm-python", python_with_vllm, "--smoke", "--batches", "2", "3", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["peers", *options])
    assert peers.main() == 0
    (file,) = (tmp_path / "out").iterdir()
    result = results.read(file)
    vllm = Path(sys.executable).name
    assert result.command == f"python -m benchmarks.peers --vllm-python {vllm} --smoke --batches 2 3 --out out"
    assert result.versions.items() >= {"vllm": "0.99", "torch": "9"}.items()
    assert list(result.measured) == [
        *("small, 2 rows, vLLM", "small, 3 rows, vLLM", "small, 2 rows, jspec"),
        "small-eagle, 2 rows, jspec",
    ]
    steps = {rows: result.details[f"small, {rows} rows, vLLM"] for rows in (2, 3)}
    for rows, details in steps.items():  # a row of 32 tokens decodes alone until the last one begins
        assert details == {"unit": "ms", "tokens": 1.0, "steps": 2 * (32 - rows - SETTLING)}
    assert 2 < result.measured["small, 2 rows, vLLM"] < 20
    assert result.settings["reasons"] == {
        "small, jspec": {"3": "no room"},
        "small-eagle, vLLM": {"2": "RuntimeError: no kernel for this", "3": "RuntimeError: no kernel for this"},
        "small-eagle, jspec": {"3": "no room"},
    }
    printed = capsys.readouterr().out
    assert "| a small model, bf16, 2 / 3 rows | 32 + 32 | 1.00 / - |" in printed
    assert "* small-eagle, vLLM, 2 / 3 rows: RuntimeError: no kernel for this" in printed


def test_rounds_of_jspec_are_timed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["of_jspec", "small-eagle", "--batches", "2"])
    assert of_jspec.main() == 0
    about, figure = map(json.loads, capsys.readouterr().out.splitlines())
    assert about["about"]["benchmark"] == "peers"
    assert figure["rows"] == 2
    assert figure["ms"] > figure["floor"] > 0
    assert figure["tokens"] > 1


def test_a_side_that_takes_too_long_is_ended(tmp_path):
    """With the processes that it began; what it had measured counts."""
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    code = f"""import subprocess, time
print('{{"rows": 1, "ms": 2.0}}', subprocess.Popen({sleep}).pid, sep='\\n', flush=True); time.sleep(60)"""
    began = time.monotonic()
    side = children.run([sys.executable, "-S", "-c", code], [1, 16], 3, tmp_path / "log", {})
    assert time.monotonic() - began < 30
    assert side == Side({}, {1: {"ms": 2.0}}, {16: "it was ended after 3 seconds"})


def test_a_side_that_cannot_run_is_reported(tmp_path):
    log = tmp_path / "log"
    assert children.jspec_side("8b", [1], 300, log) == Side({}, {}, {1: "it ended with status 2"})
    assert "no GPU: times of 8b need one" in log.read_text()


@pytest.mark.parametrize("python", [sys.executable, "/nowhere/python"])
def test_a_missing_vllm_is_an_error_that_names_the_option_and_the_fix(monkeypatch, capsys, python):
    monkeypatch.setattr(sys, "argv", ["peers", "--vllm-python", python])
    with pytest.raises(SystemExit):
        peers.main()
    error = capsys.readouterr().err
    assert f"--vllm-python {python}: expected a Python that has vLLM" in error
    assert "pip install vllm" in error


def test_a_row_is_of_its_last_run_on_a_card():
    (run,) = (run for run in results.read_all("peers", "NVIDIA H200") if run.day == "2026-11-28")
    key = peers_table.key_of("8b-fp8", 1, "jspec")
    late = dataclasses.replace(run, date="2026-12-01", measured={key: 9.0}, floors={})
    other = dataclasses.replace(late, device={"kind": "another"})
    page = peers_table.document([run, late, other])
    lines = [line for line in page.splitlines() if line.startswith("| Llama-3.1-8B, FP8 by channel")]
    assert [line.split(" | ")[3:5] for line in lines] == 2 * [["- / - / -", "9.00 / - / -"]]
    assert page.index("## another") < page.index("## NVIDIA H200")
    assert "15.09 / 16.93 / 22.27" in page
    assert "in turn on one another" in peers_table.readme([run, late, other])
