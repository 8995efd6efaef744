"""Draft heads of every kind whose weights are stored in eight or four bits: kept as they are stored, or dequantised exactly,
with a warning, where no kernel multiplies by them or the head has no decoder layers.

The cases are generated: every head in every format. The weights that a checkpoint stands for are computed by those who
packed it (tests/helpers/block_checkpoints.py), and saved beside it in float32."""

import json
import re
import warnings

import numpy as np
import pytest
import tiny_heads
from block_checkpoints import KEPT, KEPT_CODES, KINDS, NVFP4, Kind, stored_as
from fp8_checkpoints import FP8, _quantized, compressed_tensors, vllm_fp8
from greedy_texts import drafted
from mixed_checkpoints import groups
from mtp_checkpoints import with_layers
from packed_weights import model_optimizer_config, nvfp4, nvfp4_config
from stored_heads import HEADS, stored_head
from stored_params import assert_same, assert_stands_for
from tiers import in_tiers
from tiny import tiny_checkpoint

import jspec
from convert import Refusal, convert, load_draft
from jspec.checkpoints.checkpoint import Checkpoint

SMALL = {"max_batch": 2, "max_len": 48, "page_size": 16, "prefill_chunk": 16}


def scaled(one: bool, kind: str = "fp8"):
    """What stores a weight in FP8 or int8 with one scale, or with one for each output channel."""

    def store(weight):
        numbers, scale = _quantized(weight, kind, one, np.float32)
        return {".weight": numbers, ".weight_scale": scale}, numbers.astype(np.float32) * scale.reshape(-1, 1)

    return store


def scaled_without_axis(weight):
    """As NVIDIA Model Optimizer writes it: a scale ``[]``, and one of activations."""
    parts, wide = scaled(True)(weight)
    return {
        **parts,
        ".weight_scale": parts[".weight_scale"].reshape(()),
        ".input_scale": np.array(0.5, np.float32),
    }, wide


FORMATS = {
    "channel": Kind(compressed_tensors(), scaled(False), "FP8 with a scale for each output channel"),
    "tensor": Kind(compressed_tensors("tensor"), scaled(True), "FP8 with a scale for each weight"),
    "int8": Kind(
        compressed_tensors(format="int-quantized", weights__type="int"),
        scaled(False, "int8"),
        "int8 with a scale for each output channel",
    ),
    "tensor vllm": Kind(vllm_fp8(), scaled(True), "FP8 with a scale for each weight"),
    "tensor modelopt": Kind(model_optimizer_config("FP8"), scaled_without_axis, "FP8 with a scale for each weight"),
    "fp8 and nvfp4": Kind(
        groups((compressed_tensors(), ["Linear"]), (nvfp4_config(), [r"re:.*"])),
        lambda weight: nvfp4(weight) if weight.shape[0] < weight.shape[1] else scaled(False)(weight),
        "FP8 with a scale for each output channel",
    ),
    "fp8": KINDS["fp8"],
    "fp8 128": KEPT["qwen"],
    **NVFP4,
    **{name: KINDS[name] for name in ("fp8 compressed", "packed", "gptq", "awq")},
    "packed 32": KEPT_CODES["packed zeros"]._replace(words="four bits with a scale for each 32 input features"),
    "gptq 32": KEPT_CODES["gptq"]._replace(words="GPTQ, four bits with a scale for each 32 input features"),
    "awq 32": KEPT_CODES["awq"]._replace(words="AWQ, four bits with a scale for each 32 input features"),
    "nf4": KEPT_CODES["bitsandbytes nf4"]._replace(words="NF4, four bits with a scale for each block"),
}
NO_KERNEL = ("fp8", "fp8 compressed", "packed", "gptq", "awq")  # blocks and groups of sizes that nobody publishes
NO_LAYERS = ("mlp", "medusa")
EVERY = [(head, name) for head in HEADS for name in FORMATS]
# Each head in one format, and each format of one head at least.
_PAIRS = max(len(HEADS), len(FORMATS))  # with which each head and each format occurs
QUICK = [(list(HEADS)[i % len(HEADS)], list(FORMATS)[i % len(FORMATS)]) for i in range(_PAIRS)]


def read_exactly(src, wide, **options):
    """Config and params of a stored head, after a check that they stand for those of the ``wide`` one."""
    config, params = load_draft(src, "float32", **options)
    assert_stands_for(params, config, load_draft(wide, "float32", **options)[1])
    return config, params


@pytest.mark.parametrize("case", in_tiers(EVERY, test=QUICK), ids=lambda case: " in ".join(case))
def test_a_head_is_read_as_the_weights_that_it_stands_for(tmp_path, case):
    head, name = case
    src, wide = stored_head(tmp_path / "head", head, FORMATS[name])
    is_kept, is_mixed = head not in NO_LAYERS and name not in NO_KERNEL, name == "fp8 and nvfp4"
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        loaded = load_draft(src, "float32")
    assert bool(loaded[0].formats) == is_kept
    if is_kept:
        assert_stands_for(loaded[1], loaded[0], load_draft(wide, "float32")[1])
        # Of maps that are read as one and are stored otherwise than each other, some cannot be kept.
        assert all(is_mixed and "are dequantised" in str(warning.message) for warning in found)
    else:
        assert_same(loaded, load_draft(wide, "float32"))
        [warning] = found
        assert re.search(f"{re.escape(FORMATS[name].words)}.* dequantised as they are read", str(warning.message))
    with warnings.catch_warnings(action="ignore" if is_mixed else "error"):
        report = convert(src, tmp_path / "out", dtype="float32", verify="shapes")
    assert any(FORMATS[name].words in note for note in report.notes)
    assert_same(load_draft(tmp_path / "out", "float32"), loaded)


def as_array(tensor) -> np.ndarray:
    """A tensor of torch as an array; NumPy does not know FP8."""
    if "float8" in str(tensor.dtype):
        return tensor.view(dtype=pytest.importorskip("torch").uint8).numpy().view(FP8)
    return tensor.numpy()


def by_compressed_tensors(weight: np.ndarray, strategy: str):
    """A weight as the library itself stores it, and as the library dequantises it."""
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("compressed_tensors")
    pack = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers").pack_fp4_to_uint8
    steps = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    wide, more = torch.from_numpy(weight), {}
    known = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    if strategy == "int8":
        known |= {"type": "int", "strategy": "channel"}
    if strategy == "tensor_group":
        known |= {"num_bits": 4, "group_size": 16}
        overall = (448 * 6 / wide.abs().max()).reshape(1)
        peaks = wide.reshape(len(wide), -1, 16).abs().amax(-1)
        scale, more = (peaks / 6 * overall).to(torch.float8_e4m3fn), {"global_scale": overall}
    else:
        peak = wide.abs().amax().reshape(1) if strategy == "tensor" else wide.abs().amax(1, keepdim=True)
        scale = peak / (127 if strategy == "int8" else 448)
    how = library.quantization.QuantizationArgs(**known)
    dtype = torch.float32 if more else torch.int8 if strategy == "int8" else torch.float8_e4m3fn
    stored = steps.quantize(wide, scale.float(), torch.zeros_like(scale.float()), how, dtype=dtype, **more)
    expected = steps.dequantize(stored, scale.float(), args=how, **more).float().numpy()
    parts = {".weight_packed": pack(stored), ".weight_global_scale": overall} if more else {".weight": stored}
    return {end: as_array(part) for end, part in {**parts, ".weight_scale": scale}.items()}, expected


@pytest.mark.parametrize("strategy", ["channel", "tensor", "tensor_group", "int8"])
def test_compressed_tensors_reads_the_same(tmp_path, strategy):
    config = nvfp4_config() if strategy == "tensor_group" else compressed_tensors(strategy)
    config = FORMATS["int8"].config if strategy == "int8" else config
    kind = Kind(config, lambda weight: by_compressed_tensors(weight, strategy), "")
    src, wide = stored_head(tmp_path / "head", "eagle3", kind)
    assert read_exactly(src, wide)[0].formats


def test_each_format_is_tried_quickly():
    assert {name for _, name in QUICK} == set(FORMATS)
    assert {head for head, _ in QUICK} == set(HEADS)


@pytest.mark.parametrize("head", in_tiers(["eagle3", "dspark", "dflash2"], test=["dflash2"]))
@pytest.mark.parametrize("name", in_tiers(["nvfp4", "channel", "gptq 32"], test=["nvfp4"]))
def test_a_stored_head_drafts_as_the_one_that_it_stands_for(tmp_path, head, name):
    target = tiny_checkpoint(tmp_path / "target", num_hidden_layers=8)
    found = []
    for path in stored_head(tmp_path / "head", head, FORMATS[name]):
        llm = jspec.load(target, path, dtype="float32", num_draft_tokens=3, **SMALL)
        found.append(drafted(llm, [[7, 8, 9] * 3], most=12))
    [[stored], [wide]] = found
    assert stored.stats == wide.stats


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_head_may_be_quantised_otherwise(tmp_path, kind):
    src, wide = stored_head(tmp_path / "head", "eagle3", NVFP4["nvfp4"])
    for path in (src, wide):
        convert(path, tmp_path / f"{path.name}-{kind}", quantize=kind, dtype="bfloat16")
    assert_same(load_draft(tmp_path / f"head-{kind}"), load_draft(tmp_path / f"head-wide-{kind}"))


@pytest.mark.parametrize("name", ["channel", "nvfp4"])
def test_an_output_head_may_be_stored_so(tmp_path, name):
    kind = FORMATS[name]
    keys = {"quantization_config": {**kind.config, "ignore": []}}
    src, wide = stored_head(tmp_path / "head", "eagle3", kind, keys, more=("lm_head.weight",))
    config, _ = read_exactly(src, wide)
    assert config.stored_params().keys() >= {"head.weight", "fuse_in.weight"}
    target = tiny_checkpoint(tmp_path / "target", num_hidden_layers=8)
    drafted(jspec.load(target, src, num_draft_tokens=3, **SMALL), [[7, 8, 9] * 3], most=4)


def test_heads_that_model_optimizer_describes_beside_config_json(tmp_path):
    src, wide = stored_head(tmp_path / "head", "eagle3", NVFP4["nvfp4 modelopt"], {"quantization_config": None})
    described = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head*"], "kv_cache_quant_algo": None}
    (src / "hf_quant_config.json").write_text(json.dumps({"quantization": described}))
    assert read_exactly(src, wide)[0].formats == "nvfp4"


def test_prefixes_are_removed_from_names_of_codes(tmp_path):
    """As NeMo Automodel writes them."""

    def prefixed(stored):
        return {f"model.{name}": array for name, array in stored.items()}

    src, wide = stored_head(tmp_path / "head", "eagle3", NVFP4["nvfp4"], change=prefixed)
    assert read_exactly(src, wide)[0].formats == "nvfp4"


@pytest.mark.parametrize("name", ["channel", "tensor"])
def test_multi_token_prediction_layers_of_a_target_that_is_kept(tmp_path, name):
    """They stay FP8, as it does."""
    wide = with_layers(tmp_path / "wide", "DeepseekV3ForCausalLM")
    src = stored_as(tmp_path / "src", wide, FORMATS[name])
    assert Checkpoint.open(src).target_config.quantization == "fp8"
    assert read_exactly(src, wide, mtp=True)[0].formats == "fp8"


def dropped(name):
    return lambda stored: {key: array for key, array in stored.items() if key != name}


def replaced(name, array):
    return lambda stored: {**stored, name: array}


REFUSED = [
    ("eagle3", "channel", dropped("fc.weight_scale"), None, "weight_scale' is missing, and"),
    ("eagle3", "channel", dropped("fc.weight"), None, "which make no weight"),
    ("eagle3", "channel", replaced("fc.weight_scale", np.ones(3, np.float32)), None, "float32 [3], but"),
    ("eagle3", "nvfp4", dropped("fc.weight_packed"), None, "which make no weight"),
    ("eagle3", "nvfp4", dropped("fc.weight_global_scale"), None, "weight_global_scale' is missing, and"),
    ("eagle3", "nvfp4", replaced("fc.weight_scale", np.ones((64, 12), np.float32)), None, "float32 [64, 12], but"),
    ("eagle3", "nvfp4", replaced("fc.weight_packed", np.ones((64, 4), np.uint8)), None, "a multiple of 16, because so"),
    ("eagle3", "channel", dict, ("ignore", ["fc"]), "ignore says that 'fc' is not quantised, but"),
    ("medusa", "channel", dict, ("format", "mixed-precision"), "group_0.format=None: expected"),
    ("mlp", "channel", dict, ("quant_method", "quark"), "quant_method='quark' is not read"),
]


@pytest.mark.parametrize(("head", "name", "change", "key", "message"), REFUSED)
def test_tensors_and_settings_of_heads_that_do_not_fit_are_refused(tmp_path, head, name, change, key, message):
    config = {**FORMATS[name].config, **({key[0]: key[1]} if key else {})}
    src, _ = stored_head(tmp_path / "head", head, FORMATS[name], {"quantization_config": config}, change)
    with pytest.raises(Refusal) as refusal:
        load_draft(src, "float32")
    assert message in str(refusal.value)


def test_scales_that_are_no_numbers_are_refused(tmp_path):
    def damaged(stored):
        scales = stored["fc.weight_scale"].copy()
        scales.view(np.uint8)[0, 0] = 0x7F  # NaN
        return {**stored, "fc.weight_scale": scales}

    src, _ = stored_head(tmp_path / "head", "eagle3", NVFP4["nvfp4"], change=damaged)
    refuses = pytest.raises(Refusal, match=r"'fc\.weight_scale' holds numbers that are negative or NaN")
    with refuses:  # before anything is read, so that nothing warns
        load_draft(src, "float32")


@pytest.mark.parametrize("make", [tiny_heads.eagle, tiny_heads.speculators, tiny_heads.medusa])
def test_a_config_that_says_so_of_plain_weights_is_refused(tmp_path, make):
    """As in a copy of the config of a quantised target."""
    src = make(tmp_path / "head")
    config = json.loads((src / "config.json").read_text())
    (src / "config.json").write_text(json.dumps({**config, "quantization_config": compressed_tensors()}))
    with pytest.raises(Refusal, match=r"says that the weights are FP8 .*, but none of the files is; remove it if they"):
        load_draft(src, "float32")
