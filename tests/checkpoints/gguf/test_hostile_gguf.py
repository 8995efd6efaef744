"""GGUF files with damaged tensors, and mutated files: read as the package gguf reads them, or refused, and nothing else."""

import signal
import struct
import tracemalloc
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutated_gguf import KINDS, MIXED, MORE_KINDS, mutations
from raw_gguf import BOOL, FLOAT32, STRING, UINT32, RawTensor, array, raw_gguf, value
from tiny_gguf import tiny_gguf

from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.gguf.header import read_header
from jspec.checkpoints.quantized.gguf_blocks import TYPES
from jspec.quantization.weight import Weight

gguf = pytest.importorskip("gguf")

OUT = "blk.0.attn_output.weight"
NUMBERS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))}
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
NAMES = {f"blk.0.{own}.weight": f"model.layers.0.{name}.weight" for own, name in NAMES.items()}
NAMES |= {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
NAMES |= {"output.weight": "lm_head.weight"}
SECONDS, MOST_BYTES = 10, 64 * 2**20  # for a file of 0.3 MB


def entry(path: Path, name: str, kind: int | None = None, start: int | None = None, axes: list[int] | None = None):
    """Change the type, the place or the axes of a tensor in the header."""
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    count = int.from_bytes(data[at : at + 4], "little")
    if axes is not None:
        data[at + 4 : at + 4 + 8 * count] = struct.pack(f"<{count}Q", *axes)
    if kind is not None:
        data[at + 4 + 8 * count : at + 8 + 8 * count] = struct.pack("<I", kind)
    if start is not None:
        data[at + 8 + 8 * count : at + 16 + 8 * count] = struct.pack("<Q", start)
    path.write_bytes(data)


def params(path: Path) -> dict[str, np.ndarray]:
    return dict(Checkpoint.open(path).params())


def starts(path: Path) -> dict[str, int]:
    header = read_header(path)
    first = min(tensor.start for tensor in header.tensors)
    return {tensor.name: tensor.start - first for tensor in header.tensors}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: entry(path, OUT, start=starts(path)["blk.0.attn_v.weight"]), "tensor 'blk.*' overlaps 'blk"),
        (lambda path: entry(path, OUT, start=starts(path)[OUT] - 32), r"'blk\.0\.attn_v\.weight' overlaps 'blk\.0\.attn_ou"),
        (lambda path: path.write_bytes(path.read_bytes()[:-256]), r"'output_norm\.weight' ends at \d+, behind the \d+"),
        (lambda path: entry(path, OUT, kind=250), rf"tensor '{OUT}' is of type 250 of ggml, .*: expected Q4_0, Q4_1"),
        (lambda path: entry(path, OUT, kind=34), "is of type 34 of ggml"),
        (lambda path: entry(path, OUT, kind=2**32 - 1), "is of type 4294967295 of ggml"),
        (lambda path: entry(path, OUT, kind=2), rf"tensor '{OUT}' of shape \[48, 48\] is in Q4_0: .* multiple of 32"),
        (lambda path: entry(path, OUT, kind=12), "is in Q4_K: expected rows of a multiple of 256 weights"),
        (lambda path: entry(path, "output_norm.weight", kind=8), r"'output_norm\.weight' of shape \[48\] is in Q8_0: "),
        (lambda path: entry(path, OUT, axes=[96, 24]), rf"tensor '{OUT}' has shape \[24, 96\]"),
        (lambda path: entry(path, OUT, axes=[48, 2**40]), rf"gives the tensor '{OUT}' the shape \[1099511627776, 48\]"),
    ],
)  # fmt: skip
def test_tensors_that_cannot_be_are_refused(tmp_path, change, said):
    path = tiny_gguf(tmp_path / "m.gguf", "F32", hidden=48, tokens=())
    params(path)
    change(path)
    with pytest.raises(Refusal, match=rf"m\.gguf: .*{said}"):
        params(path)


def test_a_vector_in_blocks_is_refused(tmp_path):
    entry(path := tiny_gguf(tmp_path / "m.gguf", "F32", tokens=()), "output_norm.weight", kind=8)
    with pytest.raises(Refusal, match=r"'output_norm\.weight' of shape \[64\] is in Q8_0: expected rows"):
        params(path)


@pytest.mark.parametrize("number", ["NaN", "infinity"])
@pytest.mark.parametrize("kind", [kind.name for kind in TYPES.values() if kind.name not in ("MXFP4", "NVFP4")])
def test_scales_that_are_no_numbers_are_refused(tmp_path, kind, number):
    path = tiny_gguf(tmp_path / "m.gguf", {"attn_output": kind}, hidden=256, tokens=())
    found, data = params(path), path.read_bytes()
    assert any(name.endswith("out.scale") for name in found)
    start = next(tensor.start for tensor in read_header(path).tensors if tensor.name == OUT)
    size = next(one.bytes for one in TYPES.values() if one.name == kind)
    for place in NUMBERS.get(kind, (0,)):
        at, damaged = start + 5 * size + place, bytearray(data)
        damaged[at : at + 2] = {"NaN": b"\1\x7e", "infinity": b"\0\xfc"}[number]
        path.write_bytes(damaged)
        with pytest.raises(
            Refusal, match=r"m\.gguf: tensor 'model\.layers\.0\.self_attn\.o_proj\.weight' holds a scale that is no"
        ):
            params(path)


@pytest.mark.parametrize(("kind", "size", "said"), [("MXFP4", 17, "above 133"), ("NVFP4", 36, "that is no number")])
def test_scales_of_eight_bits_that_are_no_numbers_are_refused(tmp_path, kind, size, said):
    path = tiny_gguf(tmp_path / "m.gguf", {"attn_output": kind}, hidden=256, tokens=())
    params(path)
    data = bytearray(path.read_bytes())
    data[next(tensor.start for tensor in read_header(path).tensors if tensor.name == OUT) + 5 * size] = 255
    path.write_bytes(data)
    with pytest.raises(
        Refusal, match=rf"m\.gguf: tensor 'model\.layers\.0\.self_attn\.o_proj\.weight' holds a scale {said}"
    ):
        params(path)


def unpermuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a Llama's queries or keys in the order of its checkpoint."""
    return values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def as_gguf_reads(path: Path, heads: dict[str, int]) -> dict[str, np.ndarray]:
    """Name in the checkpoint -> values, as the package gguf dequantises them."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        found[NAMES[tensor.name]] = unpermuted(values, heads[tensor.name]) if tensor.name in heads else values
    return found


TOGETHER = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q2_K", "Q3_K", "Q6_K", "IQ4_XS", "BF16"]


@pytest.mark.parametrize("second", TOGETHER)
@pytest.mark.parametrize("first", TOGETHER)
def test_maps_that_are_read_together_may_be_of_any_two_types(tmp_path, first, second):
    kinds = {**dict.fromkeys(KINDS, "Q4_0"), "ffn_gate": first, "ffn_up": second}
    path = tiny_gguf(tmp_path / "m.gguf", kinds, hidden=256, width=256, tokens=())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that they are dequantised
        checkpoint = Checkpoint.open(path)
        found = dict(checkpoint.params("float32"))
    stored = checkpoint.config.language_model.stored_params().get("layers.0.mlp.gate_up.weight")  # pyright: ignore
    weight = found["layers.0.mlp.gate_up.weight"]
    if stored is not None:
        weight = Weight.of({part: found[name] for part, name in stored.names.items()}, stored.form, 256).dequantize()
    expected = as_gguf_reads(path, {})
    gates, up = (expected[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    np.testing.assert_allclose(weight, np.concatenate([gates, up]), rtol=1e-6, atol=1e-7)


VALUES = [
    value(kind, given)
    for kind, given in {0: 0, 3: 4, 4: 1, 5: -1, 10: 2**64 - 1, 11: -(2**63), 12: 1e308, 7: True}.items()
]
VALUES += [value(FLOAT32, given) for given in (0.0, float("nan"), float("inf"))]
VALUES += [value(STRING, given) for given in ("", "none", "yarn", "llama", "{% for %}", "a" * 10_000)]
VALUES += [array(UINT32, []), array(UINT32, [7] * 300), array(FLOAT32, [float("nan")] * 259)]
VALUES += [array(STRING, given) for given in ([], [""], ["a b"] * 259)]
UNREAD = ("llama.vocab_size", "tokenizer.ggml.scores", "split.tensors.count")  # of a Llama with merges in one file
KEYS = [
    *(f"llama.{key}" for key in ("block_count", "context_length", "feed_forward_length", "expert_count", "odd")),
    *(f"llama.attention.{key}" for key in ("head_count_kv", "key_length", "value_length", "layer_norm_rms_epsilon")),
    *("llama.vocab_size", "llama.attention.causal", "llama.attention.head_count", "llama.embedding_length"),
    *("general.architecture", "general.type"),
    *(f"llama.rope.{key}" for key in ("dimension_count", "freq_base", "scaling.type", "scaling.factor")),
    *("general.alignment", "split.count", "split.no", "split.tensors.count", "general.sampling.temp"),
    *("general.sampling.top_k", "tokenizer.chat_template", "tokenizer.chat_templates"),
    *(f"tokenizer.ggml.{key}" for key in ("model", "pre", "tokens", "token_type", "merges", "scores", "add_bos_token")),
    *(f"tokenizer.ggml.{key}_token_id" for key in ("bos", "eos", "eot", "unknown", "padding")),
]  # fmt: skip


def encoded(given: Any) -> bytes:
    """A value of some metadata as it is written."""
    if isinstance(given, np.ndarray | list):
        return array(STRING if isinstance(given, list) else 5, list(given))
    return value({bool: BOOL, int: UINT32, float: FLOAT32, str: STRING}[type(given)], given)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", KEYS)
def test_a_value_of_another_type_or_size_is_read_or_refused(tmp_path, key):
    path = tiny_gguf(tmp_path / "m.gguf", "F32", hidden=16, width=16)
    header, data = read_header(path), path.read_bytes()
    first = min(tensor.start for tensor in header.tensors)
    tensors = [RawTensor(name, shape[::-1], kind, start - first) for name, shape, kind, start in header.tensors]
    keys = {name: encoded(given) for name, given in header.metadata.items()}
    messages = []
    for given in [*([keys[key]] if key in keys else []), *VALUES]:
        path.write_bytes(raw_gguf(list({**keys, key: given}.items()), tensors, data[first:]))
        try:
            checkpoint = Checkpoint.open(path)
            assert checkpoint.config is not None
            checkpoint.params()
            for name in checkpoint.folder.names():
                checkpoint.folder.read(name, 2**20)
            messages.append("")
        except Refusal as refusal:
            messages.append(str(refusal))
    assert all(message.isprintable() and len(message) < 1500 for message in messages), messages
    assert len({*messages}) > 1 or key in UNREAD


class TooSlow(Exception):
    pass


def raise_too_slow(*_):
    raise TooSlow


def outcome(path: Path) -> str:
    """``refused``, ``same`` as gguf reads it, or that gguf cannot read it; anything else is an error."""
    message = None
    tracemalloc.reset_peak()
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        checkpoint = Checkpoint.open(path)
        config = checkpoint.config
        dict(checkpoint.params())
        read = {name: tensor.read() for name, tensor in checkpoint.folder.tensors.items()}  # pyright: ignore
    except Refusal as refusal:
        message = str(refusal)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    if message is not None:
        assert path.name in message
        assert message.isprintable()
        return "refused"
    heads = {"blk.0.attn_q.weight": config.num_heads, "blk.0.attn_k.weight": config.num_kv_heads}  # pyright: ignore
    try:
        expected = as_gguf_reads(path, heads)
        fields = gguf.GGUFReader(path).fields.items()
        metadata = {name: field.contents() for name, field in fields if not name.startswith("GGUF.")}
    except Exception:  # it checks little, and fails in many ways
        return "gguf fails"
    found = {
        key: given.tolist() if isinstance(given, np.ndarray) else given
        for key, given in read_header(path).metadata.items()
    }
    assert repr(found) == repr(metadata)
    assert read.keys() == expected.keys()
    for name, values in expected.items():
        assert read[name].shape == values.shape, name
        np.testing.assert_allclose(read[name].astype(np.float32), values, rtol=1e-5, atol=1e-6, err_msg=name)
    return "same"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 20))])
def test_mutated_files_are_read_as_gguf_reads_them_or_refused(tmp_path, seed):
    """50 a seed, each within a time and a memory; half of the seeds mutate another file, with other types."""
    tokens = ["<s>", "</s>", "i", "n", "in", *(chr(letter) for letter in range(33, 92))]
    path = tiny_gguf(tmp_path / "m.gguf", (KINDS, MORE_KINDS)[seed % 2], tokens=tokens, **MIXED)
    first = min(tensor.start for tensor in read_header(path).tensors)
    previous = signal.signal(signal.SIGALRM, raise_too_slow)
    tracemalloc.start()
    try:
        assert outcome(path) == "same"
        counts = Counter()
        for data in mutations(path.read_bytes(), first, 50, seed):
            path.write_bytes(data)
            counts[outcome(path)] += 1
    finally:
        tracemalloc.stop()
        signal.signal(signal.SIGALRM, previous)
    assert counts["same"] >= 5
    assert counts["refused"] >= 20
