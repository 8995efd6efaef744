"""The tools that docs/guides/quantization.md names for calibrated weights of four bits write what jspec reads.

The code of the guide is run as it stands there, but with fewer steps of AutoRound, in a virtual environment for each tool,
which has the version that the code names. Each takes minutes and gigabytes to make, and is kept in pytest's cache. What the
files stand for is computed here from their layouts, and transformers computes the logits of those weights."""

import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_checkpoint, tiny_tokenizer

import jspec

pytestmark = pytest.mark.nightly
GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "quantization.md"
CODE = {
    name: code for code, name in re.findall(r"```python\n(# pip install (\S+)\n.*?)```", GUIDE.read_text(), re.DOTALL)
}
GROUP = 128
SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 64, "num_hidden_layers": 2}


def environment(name: str, cache) -> Path:
    """The Python of a virtual environment that has a package, ``name==version``."""
    folder = cache.mkdir("calibrators") / name
    python = folder / "bin" / "python"
    if not (folder / "done").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", name], check=True)
        (folder / "done").touch()
    return python


def codes(words: np.ndarray) -> np.ndarray:
    """int32 ``[.., n]`` -> the eight numbers of four bits in each, ``[.., 8 n]``, the lowest bits first."""
    return (words[..., None] >> np.arange(0, 32, 4) & 15).reshape(*words.shape[:-1], -1)


def dequantized(stored: dict[str, np.ndarray], module: str) -> np.ndarray:
    """A weight, float32 ``[out, in]``, stored as ``pack-quantized``, or in GPTQ's layout, whose zeros are less one."""
    if f"{module}.weight_packed" in stored:
        scales = stored[f"{module}.weight_scale"].astype(np.float32)
        return (codes(stored[f"{module}.weight_packed"]) - 8) * np.repeat(scales, GROUP, axis=1)
    numbers, scales = codes(stored[f"{module}.qweight"].T), stored[f"{module}.scales"].astype(np.float32).T
    zeros = codes(stored[f"{module}.qzeros"]).T + 1
    group = stored.get(f"{module}.g_idx", np.arange(numbers.shape[1]) // GROUP)
    return (numbers - zeros[:, group]) * scales[:, group]


def logits_of(folder: Path, original: Path, tokens: list[int]) -> np.ndarray:
    """The logits that transformers computes in float32 with the weights that ``folder`` stands for."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from safetensors.torch import load_file

    held = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    stored = {name: (t.float() if t.is_floating_point() else t).numpy() for name, t in held.items()}
    model = transformers.AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32).eval()
    quantised = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            plain = name in stored
            quantised += not plain
            parameter.copy_(
                torch.from_numpy(stored[name] if plain else dequantized(stored, name.removesuffix(".weight")))
            )
        assert quantised == 14
        return model(torch.tensor([tokens])).logits[0].numpy()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with what the code reads: a model and texts."""
    folder = tmp_path_factory.mktemp("work")
    tiny_tokenizer(
        tiny_checkpoint(
            folder / "path/to/hf", dtype="bfloat16", bos_token_id=0, eos_token_id=1, vocab_size=264, **SIZES
        )
    )
    source = inspect.getsource(textwrap) + inspect.getsource(json) + inspect.getsource(subprocess)
    texts = [source[start : start + 700] for start in range(0, 16 * 700, 700)]  # a token is a byte here
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


@pytest.mark.parametrize("name", CODE)
def test_what_the_guide_runs_is_loaded(pytestconfig, workplace, name):
    code = CODE[name].replace("iters=200", "iters=4")
    variables = {
        **os.environ,
        "GPTQMODEL_CPU_WORKERS": "2",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "",
    }
    command = [environment(name, pytestconfig.cache), "-c", code]
    run = subprocess.run(command, cwd=workplace, env=variables, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    [folder] = [workplace / path for path in re.findall(r'jspec\.load\("(.*)"\)', code)]
    llm = jspec.load(folder, dtype="float32", max_batch=1, max_len=64)
    assert llm.target.config.quantization.startswith("int4")  # as it is stored
    tokens = list(range(2, 42))
    wanted = logits_of(folder, workplace / "path/to/hf", tokens)
    assert np.abs(jnp.asarray(llm.logits(tokens)) - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_every_tool_is_tried():
    assert [name.partition("==")[0] for name in CODE] == ["gptqmodel", "auto-round", "llmcompressor"]
