"""Patterns of modules that a checkpoint brings: whatever they are and wherever they stand, matching them ends soon."""

import ast
import contextlib
import copy
import json
import pathlib
import re
import signal
import time

import pytest
from fp8_checkpoints import compressed_tensors, vllm_fp8
from mixed_checkpoints import MIXES
from packed_weights import (
    auto_round_config,
    awq_config,
    bitsandbytes_config,
    compressed_config,
    fp8_config,
    gptq_config,
    model_optimizer_config,
    nvfp4_config,
    pack_config,
    torchao_config,
)
from tiny import tiny_config

import jspec
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.quantized import config_fields
from jspec.checkpoints.quantized.config import READERS, read_quantization
from jspec.checkpoints.quantized.config_fields import MAX_PATTERNS, MAX_SECONDS, Modules
from jspec.checkpoints.quantized.mixed import Mixed
from jspec.checkpoints.quantized.scaled import Scaled

NAMES = [f"model.layers.{i}.block_sparse_moe.experts.{j}.down_proj" for i in range(60) for j in range(128)]
# The slowest pattern that is compiled: three repetitions of all letters of a name.
HOSTILE = r"[a-z_0-9.]*[a-z_0-9.]*[a-z_0-9.]*z"
KEY = "quantization_config"
# An entry or more for each reader, as its library writes it.
CONFIGS = {
    "channels": compressed_tensors(),
    "tensors": compressed_tensors("tensor"),
    "blocks": compressed_config("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[8, 8]),
    "packed": pack_config(),
    "nvfp4": nvfp4_config(),
    "vllm": {**vllm_fp8(), "modules_to_not_convert": None},
    "deepseek": fp8_config(),
    "gptq": gptq_config(),
    "awq": awq_config(),
    **{name: auto_round_config(None, quant_method=name) for name in ("auto-round", "auto_round", "intel/auto-round")},
    "bitsandbytes": bitsandbytes_config(),
    "torchao": torchao_config(),
    "modelopt": model_optimizer_config("FP8"),
    "modelopt channels": model_optimizer_config("FP8_PER_CHANNEL_PER_TOKEN"),
    "modelopt blocks": model_optimizer_config("FP8_PB_WO"),
    "modelopt nvfp4": model_optimizer_config("NVFP4"),
    **{name: MIXES[name].config for name in ("FP8 and NVFP4", "GPTQ", "AutoRound", "Model Optimizer")},
}
BACKTRACKING = (r"(a+)+$", r"([a-z.]|[a-z_.0-9])*z$", HOSTILE)
# A pattern as each library writes it, in a list or as the key of an object.
FORMS = ("re:{}", "{}", "+:{}", "-:{}", "*{}*{}*{}*z")


def modules(*patterns) -> Modules:
    return Modules(frozenset(), tuple(map(re.compile, patterns)), "ignore")


@contextlib.contextmanager
def within(seconds: float):
    """Fails if the block takes more CPU time than that. A matcher that does not end is stopped after some seconds."""

    def stop(*_):
        raise AssertionError("a pattern is matched for seconds")

    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, 20)
    began = time.thread_time()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
    assert time.thread_time() - began < seconds


def paths_of(config: dict) -> list[tuple[str, ...]]:
    """The paths of all keys in which a reader may find names: those that it looks up, and those that are there."""
    fields = Fields({KEY: config}, "config.json")
    read_quantization(fields)
    asked = [tuple(path.split(".")[1:]) for path in fields.asked]
    return sorted({*(path for path in asked if is_in(config, path[:-1])), *((key,) for key in config)} - {()})


def is_in(config, path: tuple[str, ...]) -> bool:
    """Whether an object has this path, which one through a key with dots in it is not."""
    return not path or (isinstance(config, dict) and path[0] in config and is_in(config[path[0]], path[1:]))


def with_value(config: dict, path: tuple[str, ...], value) -> dict:
    config = copy.deepcopy(config)
    *outer, last = path
    at = config
    for key in outer:
        at = at[key]
    at[last] = value
    return config


def hostile_values() -> list:
    """Lists, objects and strings of patterns: each alone, then as many as fit into config.json, then one as long as that."""
    written = [form.replace("{}", pattern) for pattern in BACKTRACKING for form in FORMS]
    many = [f"{form}{'x' * (i % 7)}".replace("{}", HOSTILE) for form in FORMS for i in range(2000)]
    lists = [*([one] for one in written), ["re:" + HOSTILE] * MAX_PATTERNS, many, ["re:" + "(a+)+" * 100_000]]
    objects = [{key: {"bits": 8, "group_size": 64} for key in one} for one in (written, many, lists[-1])]
    return [*lists, *objects, lists[-1][0]]


VALUES = hostile_values()


def test_every_reader_is_tried():
    assert {config["quant_method"] for config in CONFIGS.values()} == READERS.keys()
    at = {f"{name}: {'.'.join(path)}" for name, config in CONFIGS.items() for path in paths_of(config)}
    assert at >= {
        "channels: ignore",
        "channels: config_groups.group_0.targets",
        "packed: ignore",
        "nvfp4: ignore",
        "vllm: ignored_layers",
        "vllm: modules_to_not_convert",
        "deepseek: modules_to_not_convert",
        "gptq: dynamic",
        "awq: modules_to_not_convert",
        "auto-round: extra_config",
        "modelopt: ignore",
        "modelopt: exclude_modules",
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_patterns_anywhere_end_soon(name):
    refusals = []
    for path in paths_of(CONFIGS[name]):
        for value in VALUES:
            fields = Fields({KEY: with_value(CONFIGS[name], path, value)}, "config.json")
            with within(1.5):
                try:
                    stored = read_quantization(fields)
                    if isinstance(stored, Scaled):
                        [stored.includes([module]) for module in NAMES[::8]]
                    if isinstance(stored, Mixed):
                        [stored.of_module(module, {}) for module in NAMES[::8]]
                except Refusal as refusal:
                    refusals.append(str(refusal))
    assert refusals
    assert [said for said in refusals if KEY not in said] == []


def test_a_whole_checkpoint_with_them_is_refused_by_the_key(tmp_path):
    config = compressed_tensors(ignore=["re:" + HOSTILE] * MAX_PATTERNS)
    raw = {**tiny_config(), "num_hidden_layers": 4096, KEY: config}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with within(10), pytest.raises(Refusal, match=rf"{KEY}\.ignore has patterns whose matching takes more than"):
        _ = Checkpoint.open(tmp_path).target_config  # the rest of the time is that of 4,096 layers


def test_the_slowest_patterns_are_given_up():
    assert config_fields._SIMPLE.fullmatch(HOSTILE)
    ignored, began = modules(*[HOSTILE] * MAX_PATTERNS), time.thread_time()
    with pytest.raises(Refusal, match=r"ignore has patterns whose matching takes more than 0.5 s.*list the names"):
        [ignored.include([name]) for name in NAMES]
    assert time.thread_time() - began < 2 * MAX_SECONDS


def test_patterns_in_use_take_no_time():
    ignored, began = (
        modules(r".*lm_head", r".*self_attn\.(q|k|v)_proj$", r"model\.layers\.\d+\.mlp\.gate$"),
        time.thread_time(),
    )
    assert not any(ignored.include([name]) for name in NAMES)
    assert ignored.include(["model.layers.3.mlp.gate"])
    assert time.thread_time() - began < MAX_SECONDS / 4


@pytest.mark.parametrize(
    ("listed", "included", "others"),
    [
        ("*lm_head*", ["lm_head", "model.lm_head.x"], ["model.head"]),
        ("model.layers.?.mlp", ["model.layers.3.mlp"], ["model.layers.13.mlp", "model.layers.3xmlp"]),
        ("layers.[01].*", ["layers.0.mlp", "layers.1.x"], ["layers.2.mlp"]),
        ("layers.[!01].*", ["layers.2.mlp"], ["layers.0.mlp"]),
    ],
)
def test_wildcards_mean_what_they_do_in_model_optimizer(listed, included, others):
    fields = Fields({KEY: model_optimizer_config("FP8", ignore=[listed])}, "config.json")
    stored = read_quantization(fields)
    assert isinstance(stored, Scaled)
    found = [stored.ignored.include([name]) for name in (*included, *others)]
    assert found == [True] * len(included) + [False] * len(others)


def test_letters_that_are_no_wildcards_are_refused():
    fields = Fields({KEY: model_optimizer_config("FP8", ignore=["(a|b)*"])}, "config.json")
    with pytest.raises(Refusal, match=re.escape(f"{KEY}.ignore has the pattern")):
        read_quantization(fields)


def test_no_other_function_makes_a_pattern():
    """Patterns that are not written in the code are compiled in one class of ``jspec.checkpoints``, which bounds them, and
    in one function that puts fixed names into a pattern."""
    root, found = pathlib.Path(jspec.__file__).parent / "checkpoints", set()
    for file in sorted(root.rglob("*.py")):
        for function in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(function, ast.FunctionDef):
                found |= {(file.name, function.name) for call in ast.walk(function) if _compiles(call)}
    assert found == {("config_fields.py", "_compiled"), ("config_fields.py", "_any"), ("quantized.py", "_shapes")}


def _compiles(node: ast.AST) -> bool:
    """Whether a node calls ``re`` or ``fnmatch`` with a pattern that is no literal."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    module = node.func.value
    if not (isinstance(module, ast.Name) and module.id in ("re", "fnmatch", "regex")) or node.func.attr == "escape":
        return False
    return module.id != "re" or not isinstance(node.args[0], ast.Constant)
