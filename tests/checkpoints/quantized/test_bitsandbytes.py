"""Checkpoints that bitsandbytes quantises: written by its own modules in a model of transformers, and what it computes.

``accelerate``, without which transformers quantises nothing, is no part of the extra ``parity``. So linear maps are replaced
here, as it does; its folders were found to have the same tensors and the same ``quantization_config``."""

import json

import numpy as np
import pytest
from block_checkpoints import KEPT_CODES, block_checkpoint
from children import run_library
from fp8_checkpoints import DOWN, Q, changed, names_in, raw_tensor
from held_tensors import read
from packed_weights import bitsandbytes, bitsandbytes_config
from stored_params import logits, refuses, rewrite
from tiny import tiny_checkpoint, write_weights

from convert import convert, load_folder

WRITE = """
import json, os, sys
import bitsandbytes as bnb, numpy as np, torch, transformers
from bitsandbytes.functional import _convert_weight_packed_for_cpu, dequantize_4bit
root = os.getcwd()
for number, (config, sizes, plain, spoilt) in enumerate(json.loads(sys.argv[1])):
    os.makedirs(f"{root}/{number}")
    os.chdir(f"{root}/{number}")
    torch.manual_seed(0)
    config = transformers.BitsAndBytesConfig(**config)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=97, num_hidden_layers=2, **sizes)).eval()
    names = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear and name not in plain]
    wide = {}
    for name in names:
        linear = model.get_submodule(name)
        sizes = linear.in_features, linear.out_features, linear.bias is not None
        if config.load_in_4bit:
            new = bnb.nn.Linear4bit(*sizes, torch.float32, config.bnb_4bit_use_double_quant, config.bnb_4bit_quant_type)
            new.load_state_dict(linear.state_dict())
            new.to("cpu")
            wide[name] = dequantize_4bit(new.weight.data, new.weight.quant_state)
        else:
            new = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
            new.load_state_dict(linear.state_dict())
            new.to("cpu")
            wide[name] = bnb.functional.int8_vectorwise_dequant(new.weight.CB, new.weight.SCB)
        model.set_submodule(name, new.eval())
    if spoilt:  # as a pass on a CPU with instructions for bfloat16 does, on any CPU
        for name in names:
            weight = model.get_submodule(name).weight
            weight.data, weight.quant_state = _convert_weight_packed_for_cpu(weight.data, weight.quant_state)
    model.config.quantization_config = config
    model.save_pretrained("folder")
    for name in names:
        linear = torch.nn.Linear(*reversed(wide[name].shape), bias=False)
        linear.weight.data = wide[name]
        model.set_submodule(name, linear)
    rng, found = np.random.default_rng(0), []
    with torch.no_grad():
        for length in (5, 33):
            found.append(model(torch.tensor(rng.integers(97, size=(1, length)))).logits[0].numpy())
    np.savez("logits.npz", *found)
"""


def case(*, plain=("lm_head",), spoilt=False, hidden=64, tied=False, **config):
    """What the script takes for a folder."""
    sizes = {"hidden_size": hidden, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    return config, {**sizes, "tie_word_embeddings": tied}, plain, spoilt


FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FOLDERS = [  # how the tool writes each, and as what it is kept
    (FOUR, "nf4_64"),
    ({**FOUR, "bnb_4bit_use_double_quant": True, "tied": True}, "nf4_64"),
    ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True, "plain": ()}, "fp4_64"),  # FP4, and the head
    ({**FOUR, "hidden": 96}, "nf4_32"),  # of a block of most maps, half are of another channel
    ({"load_in_8bit": True}, "int8"),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Where the tool has written a ``folder`` and ``logits.npz`` for each of ``FOLDERS``, and then as after a pass."""
    root = tmp_path_factory.mktemp("written")
    run_library(WRITE, root, [*(case(**how) for how, _ in FOLDERS), case(spoilt=True, **FOUR)])
    return root


@pytest.mark.parametrize("number", range(len(FOLDERS)), ids=lambda number: "-".join(map(str, FOLDERS[number])))
def test_a_folder_of_the_tool_computes_what_the_tool_reads(written, tmp_path, number):
    (how, form), folder = FOLDERS[number], written / f"{number}/folder"
    config, _ = load_folder(folder)
    assert (config.quantization, config.head_quantization) == (form, form if how.get("plain") == () else None)
    if "hidden" in how:  # on a CPU, the tool does not undo its own rounding: findings/bnb-cpu-blocks-across-rows.sh
        return
    results = logits(folder)
    for found, logit in zip(results, np.load(written / f"{number}/logits.npz").values(), strict=True):
        np.testing.assert_allclose(found, logit, rtol=0, atol=1e-5 * np.abs(logit).max())
    convert(folder, tmp_path / "out", dtype="float32", verify="shapes")
    np.testing.assert_array_equal(logits(tmp_path / "out")[0], results[0])


def test_a_folder_saved_after_a_pass_on_a_cpu_is_refused(written):
    words = f"tensor '{Q}.weight.absmax' is bfloat16 [1, 64]: expected float32 [64]; bitsandbytes changes it"
    refuses(written / f"{len(FOLDERS)}/folder", words)


@pytest.mark.parametrize(
    ("block", "inputs", "double"), [(32, 96, False), (64, 40, True), (256, 96, True), (4096, 24, False)]
)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_blocks_go_on_from_row_to_row(kind, block, inputs, double):
    weight = np.random.default_rng(0).normal(0, 0.1, (64, inputs)).astype(np.float32)
    parts, wide = bitsandbytes(weight, kind, block, double)
    np.testing.assert_array_equal(read(bitsandbytes_config(kind=kind), parts, weight.shape), wide)


def test_codes_in_other_dtypes_are_bytes_all_the_same():
    weight = np.random.default_rng(0).normal(0, 0.1, (64, 96)).astype(np.float32)
    parts, wide = bitsandbytes(weight)
    parts[".weight"] = parts[".weight"].reshape(-1).view(np.float32)[:, None]
    np.testing.assert_array_equal(
        read(bitsandbytes_config(bnb_4bit_quant_storage="float32"), parts, weight.shape), wide
    )


def test_blocks_within_groups_are_dequantised_with_a_warning(tmp_path):
    src = block_checkpoint(tmp_path / "src", KEPT_CODES["bitsandbytes nf4"], hidden_size=48, intermediate_size=80)
    with pytest.warns(UserWarning, match="in bfloat16 they take two bytes each instead of half a one"):
        config, params = load_folder(src, "float32")
    assert dict(config.other_formats).items() >= dict.fromkeys(("layers.1.attention.qkv", "layers.1.mlp.down")).items()
    wide = load_folder(tmp_path / "src-wide", "float32")[1]
    np.testing.assert_array_equal(params["layers.1.mlp.down.weight"], wide["layers.1.mlp.down.weight"])


STATE = f"{DOWN}.weight.quant_state.bitsandbytes__nf4"


def with_state(path, content: bytes | dict):
    """A checkpoint with other bytes, or other keys, in place of the state of a weight."""
    src = block_checkpoint(path, KEPT_CODES["bitsandbytes nf4"])
    tensors = {name: raw_tensor(src, name) for name in names_in(src)}
    if isinstance(content, dict):
        content = json.dumps(json.loads(tensors[STATE].tobytes()) | content).encode()
    write_weights(src, tensors | {STATE: np.frombuffer(content, np.uint8)})
    return src


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_type": "fp4"}, "quant_type='fp4': expected 'nf4'"),
        ({"blocksize": 48}, "blocksize=48: expected 32 or 64 or"),
        ({"blocksize": True}, "blocksize=True: expected 32"),
        ({"blocksize": 128}, f"tensor '{DOWN}.weight.absmax' is float32 [128], but config.json asks for float32 [64]"),
        ({"shape": [128, 64]}, "says shape=[128, 64]: expected [64, 128], by config.json; fetch"),
        ({"shape": None}, "shape=None: expected a list of sizes"),
        ({"dtype": "int8"}, "dtype='int8': expected 'float32' or"),
        ({"nested_blocksize": 256}, "nested_dtype=None: expected 'float32' or"),
        (
            {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 1e39},
            "nested_offset=1e+39: expected a number",
        ),
        (
            {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.1},
            f"tensor '{DOWN}.weight.nested_absmax' is missing",
        ),
    ],
    ids=str,
)
def test_states_of_weights_are_checked(tmp_path, changes, words):
    refuses(with_state(tmp_path / "src", changes), words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[" * 200, "nests deeper than"),
        (b"{", "cannot be read as JSON"),
        (b"[]", "holds no JSON object: expected the state of a quantised weight"),
        (b"{" + b" " * 5000, "is uint8 [5001]: expected uint8, at most 4096 bytes"),
    ],
)
def test_states_that_are_none_are_refused(tmp_path, content, words):
    refuses(with_state(tmp_path / "src", content), words)


def test_another_table_is_refused(tmp_path):
    src = block_checkpoint(tmp_path / "src", KEPT_CODES["bitsandbytes nf4"])
    table = raw_tensor(src, f"{DOWN}.weight.quant_map")[::-1].copy()
    refuses(
        changed(src, **{f"{DOWN}.weight.quant_map": table}), "holds other numbers than those of nf4: expected -1.0000"
    )


def test_a_channel_of_zeros_in_eight_bits(tmp_path):
    src = block_checkpoint(tmp_path / "src", KEPT_CODES["bitsandbytes int8"])
    largest = raw_tensor(src, f"{DOWN}.SCB").copy()
    largest[3] = 0
    _, params = load_folder(changed(src, **{f"{DOWN}.SCB": largest}))
    assert 0 < params["layers.1.mlp.down.scale"][3] < 1e-30


def test_other_orders_of_eight_bits_are_refused(tmp_path):
    src = block_checkpoint(tmp_path / "src", KEPT_CODES["bitsandbytes int8"])
    refuses(changed(src, **{f"{DOWN}.weight_format": np.array(2, np.uint8)}), "weight_format' holds 2: expected 0")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (bitsandbytes_config(bnb_4bit_quant_type="af4"), "bnb_4bit_quant_type='af4': expected 'fp4' or 'nf4'"),
        (
            bitsandbytes_config(bnb_4bit_quant_storage="float64"),
            "bnb_4bit_quant_storage='float64': expected 'uint8' or",
        ),
        (bitsandbytes_config(_load_in_4bit=False), "_load_in_4bit=False: expected true, as without the _"),
        (bitsandbytes_config(load_in_8bit=True, _load_in_8bit=True), "load_in_4bit=True: expected true, or"),
        (bitsandbytes_config(8, llm_int8_has_fp16_weight=True), "llm_int8_has_fp16_weight=True: expected false,"),
        (bitsandbytes_config(llm_int8_threshold="6"), "llm_int8_threshold='6': expected a number from 0 on"),
        (
            bitsandbytes_config(llm_int8_skip_modules=[DOWN]),
            f"llm_int8_skip_modules says that '{DOWN}' is not quantised",
        ),
        (bitsandbytes_config(kind="fp4"), f"tensor '{Q}.weight.quant_state.bitsandbytes__fp4' is missing, and"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_config_json_says_is_checked(tmp_path, config, words):
    src = block_checkpoint(tmp_path / "src", KEPT_CODES["bitsandbytes nf4"])
    rewrite(src, quantization_config=config)
    refuses(src, words)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_plain_folder_that_says_how_it_was_loaded_is_refused(tmp_path, bits):
    """As transformers once wrote it: without the method."""
    src = tiny_checkpoint(tmp_path / "src", quantization_config={f"load_in_{bits}bit": True})
    refuses(src, "but none of the files is; remove it if they are not quantised")
