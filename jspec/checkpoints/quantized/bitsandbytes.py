"""Weights that bitsandbytes quantises: NF4 and FP4 (QLoRA, Dettmers et al., 2023), and eight bits (LLM.int8, 2022).

In four bits a weight ``[out, in]`` is a row of blocks of so many numbers, whatever its shape; a code names one of sixteen
numbers (``jspec.quantization.tables``), and the first of the two codes in a byte is in its upper half. These tensors of
``<map>.weight`` hold it:

| tensor | | |
|---|---|---|
| | bytes ``[n, 1]`` | the codes; other dtypes of as many bytes are read, too (``bnb_4bit_quant_storage``) |
| ``.absmax`` | float32 ``[blocks]`` | the scale of each block, or with double quantisation a code of it, uint8 |
| ``.quant_map`` | float32 ``[16]`` | the table |
| ``.nested_absmax``, ``.nested_quant_map`` | float32 | of the scales' own blocks, and of their codes |
| ``.quant_state.bitsandbytes__nf4`` | bytes of JSON | the sizes of blocks, the shape, and an offset of all scales |

A scale is the same for all inputs of a group that lies in one block: so weights are kept as they are stored wherever 32, 64
or 128 inputs lie in one. The scales of double quantisation are computed as they are read.

In eight bits, ``<map>.SCB`` has 127 times the scale of each output channel. What LLM.int8 does with activations, whose
largest columns it multiplies in 16 bits, is not done."""

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.json_files import parse_json
from jspec.checkpoints.files.ranges import Index, bounds_of
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import FLOAT_DTYPES, STORED_DTYPES, ComputedTensor, Tensor
from jspec.checkpoints.quantized.config_fields import require_one_of
from jspec.checkpoints.quantized.format import BlockFormat, StoredParts, WeightTensors, read_plain
from jspec.checkpoints.quantized.scaled import ScaledFormat, ScaledWeight
from jspec.checkpoints.quantized.stored_codes import CodedTensor, RepackedCodes
from jspec.quantization.formats import KINDS, SIZES, Format, tabled
from jspec.quantization.tables import TABLES

METHOD = "bitsandbytes"
BLOCKS = tuple(1 << i for i in range(5, 13))  # sizes that blocks of numbers, and of scales, may have
MAX_STATE = 4096  # bytes of JSON; it has some 170
_STORAGE = ("uint8", "int8", "float16", "bfloat16", "float32")
# The codes of jspec for those of bitsandbytes: it orders NF4 by the numbers, and the first bit of FP4 is its last, inverted.
_CODES = {
    "nf4": np.argsort(TABLES["nf4"].values()).astype(np.uint8),
    "fp4": np.array([code >> 1 | (~code & 1) << 3 for code in range(16)], np.uint8),
}
_BYTES = np.arange(256)
_TURNED = {
    kind: codes[_BYTES >> 4] | codes[_BYTES & 15] << 4 for kind, codes in _CODES.items()
}  # the first one is lower
# The same of two bytes, which are looked up together, so many at a time that they stay in a CPU's cache.
_PAIRS = {kind: (of[_BYTES] | of[_BYTES, None].astype(np.uint16) << 8).reshape(-1) for kind, of in _TURNED.items()}
_AT_ONCE = 1 << 16


class State(NamedTuple):
    """What the JSON beside a weight says.

    Attributes:
      block: how many numbers share a scale.
      shape: of the weight.
      nested: with double quantisation, how many scales share one of their own, their dtype, and what is added to them.
    """

    block: int
    shape: tuple[int, ...]
    nested: tuple[int, str, float] | None


def read_state(tensor: Tensor, kind: str) -> State:
    """The state in a tensor, of a weight in ``nf4`` or ``fp4``; a ``Refusal`` if it is none, or one of another kind."""
    where = f"{tensor.file}: tensor {tensor.name!r}"
    if tensor.dtype != "uint8" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_STATE:
        raise Refusal(f"{where} is {tensor.dtype} {list(tensor.shape)}: expected uint8, at most {MAX_STATE} bytes")
    raw = parse_json(tensor.read().tobytes(), where)
    if not isinstance(raw, dict):
        raise Refusal(f"{where} holds no JSON object: expected the state of a quantised weight; fetch it again")
    fields, nested = Fields(raw, where), None
    known = {"quant_type": (kind,), "blocksize": BLOCKS, "dtype": FLOAT_DTYPES}
    if raw.get("nested_blocksize") is not None:
        known |= {"nested_blocksize": BLOCKS, "nested_dtype": FLOAT_DTYPES}
    for key, values in known.items():
        require_one_of(fields, key, *values)
    shape, offset = raw.get("shape"), raw.get("nested_offset")
    if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
        raise fields.refuse("shape", "a list of sizes")
    if "nested_blocksize" in known:
        if not isinstance(offset, float | int) or not abs(offset) <= float(np.finfo(np.float32).max):
            raise fields.refuse("nested_offset", "a number")
        nested = raw["nested_blocksize"], raw["nested_dtype"], float(offset)
    return State(raw["blocksize"], tuple(shape), nested)


@dataclasses.dataclass(frozen=True)
class FourBitWeight(CodedTensor):
    """A weight ``[out, in]`` in NF4 or FP4.

    Attributes:
      kind: ``nf4`` or ``fp4``.
      state: its blocks and scales.
      codes: ``[n, 1]``, two codes in a byte.
      absmax: float32 ``[blocks]``, or codes of them.
      table: ``[16]``, the numbers of codes.
      nested: of double quantisation ``nested_absmax`` and ``nested_quant_map``; else None.
    """

    kind: str
    state: State
    codes: Tensor
    absmax: Tensor
    table: Tensor
    nested: tuple[Tensor, Tensor] | None

    def scales(self, first: int = 0, stop: int | None = None) -> np.ndarray:
        """The scales of the blocks ``first .. stop - 1``, float32."""
        scales = self.absmax.read_part((slice(first, stop),))
        if self.nested is not None and self.state.nested is not None:
            (size, dtype, offset), (largest, table) = self.state.nested, (_finite(one) for one in self.nested)
            of_scales = table[scales] * largest[np.arange(first, first + len(scales)) // size]
            scales = of_scales.astype(FLOAT_DTYPES[dtype])  # as bitsandbytes rounds them, if not to float32
            scales = (scales.astype(np.float32) + np.float32(offset)).astype(FLOAT_DTYPES[dtype]).astype(np.float32)
        return _finite(self.absmax, scales)

    def check(self):
        """Read all but the codes, which are few, and refuse what they cannot be."""
        wanted = TABLES[self.kind].values()[_CODES[self.kind]]
        if not np.allclose(self.table.read(), wanted, rtol=0, atol=1e-6):
            raise Refusal(
                f"{self.table.file}: tensor {self.table.name!r} holds other numbers than those of {self.kind}: "
                f"expected {', '.join(f'{number:.4f}' for number in wanted)}; fetch it again"
            )
        self.scales()

    def stored(self) -> StoredParts | None:
        """As ``QuantizedTensor.stored``; None if blocks begin and end within groups of 32 inputs."""
        sizes = [size for size in SIZES if self.state.block % size == self.shape[1] % size == 0]
        if not sizes:
            return None
        form, of_groups = tabled(self.kind, sizes[-1]), functools.partial(self.scales_of, sizes[-1])
        codes, shape = RepackedCodes.of(self, 0, self.shape[1]), form.arrays(self.shape)["scale"].shape
        scale = ComputedTensor.of(self, shape, form.scale, of_groups, self.check)
        return StoredParts(form, {"weight": codes, "scale": scale})

    def scales_of(self, group: int, index: Index) -> np.ndarray:
        """A part of the scales of all ``group`` inputs, float32 ``[out, in / group]``; those of each lie in one block."""
        outputs, inputs = self.shape
        (first, stop), (left, right) = bounds_of(index, (outputs, inputs // group))
        blocks = (np.arange(first, stop)[:, None] * inputs + np.arange(left, right) * group) // self.state.block
        start, end = (int(blocks[0, 0]), int(blocks[-1, -1]) + 1) if blocks.size else (0, 0)
        return self.scales(start, end)[blocks - start]

    def words_of(self, outputs: slice, words: slice) -> np.ndarray:
        """As ``CodedTensor``, of rows that are whole words."""
        of_row = self.shape[1] // 2 // STORED_DTYPES[self.codes.dtype].itemsize  # stored numbers
        rows = self.codes.read_part((slice(outputs.start * of_row, outputs.stop * of_row),))
        pairs = rows.reshape(-1).view(np.uint16)
        found = np.empty_like(pairs)
        for start in range(0, len(pairs), _AT_ONCE):
            some = slice(start, start + _AT_ONCE)
            np.take(_PAIRS[self.kind], pairs[some], out=found[some], mode="clip")
        return found.view(np.uint32).reshape(-1, self.shape[1] // 8)[:, words].T

    def codes_of(self, outputs: slice, inputs: slice) -> np.ndarray:
        """The codes of some features, uint8 ``[in, out]``."""
        first, stop = outputs.start * self.shape[1], outputs.stop * self.shape[1]
        item = STORED_DTYPES[self.codes.dtype].itemsize * 2  # codes of a stored number
        rows = self.codes.read_part((slice(first // item, -(-stop // item)),))
        packed = np.ascontiguousarray(rows).view(np.uint8).reshape(-1)
        codes = np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)[first % item :][: stop - first]
        return _CODES[self.kind][codes].reshape(-1, self.shape[1])[:, inputs].T

    def read_part(self, index: Index) -> np.ndarray:
        """``read()[index]``. It reads the codes of whole rows, but of no others."""
        (first, stop), (left, right) = bounds_of(index, self.shape)
        if first >= stop or left >= right:
            return np.empty(self.shape, np.float32)[index]
        size = math.gcd(self.state.block, self.shape[1])  # so many inputs lie in one block
        rows, groups = slice(first, stop), slice(left // size, -(-right // size))
        inputs = slice(groups.start * size, groups.stop * size)
        values = TABLES[self.kind].values()[self.codes_of(rows, inputs).T].reshape(stop - first, -1, size)
        values *= self.scales_of(size, (rows, groups))[:, :, None]
        return values.reshape(stop - first, -1)[:, left - inputs.start : right - inputs.start]


def _finite(tensor: Tensor, values: np.ndarray | None = None) -> np.ndarray:
    """The values of a tensor, or those computed from it, float32; a ``Refusal`` if one of them is no number."""
    values = tensor.read().astype(np.float32) if values is None else values
    if not np.isfinite(values).all():
        wrong = values[~np.isfinite(values)]
        raise Refusal(f"{tensor.file}: tensor {tensor.name!r} holds {wrong[0]}: expected numbers; fetch it again")
    return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class FourBits(BlockFormat):
    """NF4 or FP4 of bitsandbytes.

    Attributes:
      kind: ``nf4`` or ``fp4``.
      storage: the dtype of the tensors of codes.
    """

    bits: int = 4
    scale_end: str = ".weight.absmax"
    dtype: str | None = "uint8"
    kind: str
    storage: str

    @property
    def summary(self) -> str:
        return f"{self.kind.upper()}, four bits with a scale for each block (bitsandbytes)"

    def shape(self, parts: WeightTensors) -> tuple[int, ...] | None:
        state = parts.tensors.get(self.ends[-1])
        return None if state is None else read_state(state, self.kind).shape

    def weight(self, name: str, shape: tuple[int, int], parts: WeightTensors) -> FourBitWeight:
        count, end = math.prod(shape), self.ends[-1]
        found = parts.take(end, parts.tensors[end].shape if end in parts.tensors else (), ("uint8",))
        state = read_state(found, self.kind)
        if state.shape != shape:
            raise Refusal(
                f"{parts.where}/{found.file}: tensor {found.name!r} says shape={list(state.shape)}: expected {list(shape)}, "
                "by config.json; fetch both again"
            )
        each = 2 * STORED_DTYPES[self.storage].itemsize
        codes, blocks = parts.take(".weight", (-(-count // each), 1), (self.storage,)), -(-count // state.block)
        nested, absmax = None, parts.tensors.get(self.scale_end)
        if absmax is not None and absmax.dtype == "bfloat16":
            raise Refusal(
                f"{parts.where}/{absmax.file}: tensor {absmax.name!r} is bfloat16 {list(absmax.shape)}: expected float32 "
                f"{[blocks]}; bitsandbytes changes it if a model computes on a CPU before it is saved: save it anew before"
            )
        if state.nested is not None:
            largest = parts.take(".weight.nested_absmax", (-(-blocks // state.nested[0]),), ("float32",))
            nested = largest, parts.take(".weight.nested_quant_map", (256,), ("float32",))
        table = parts.take(".weight.quant_map", (16,), ("float32",))
        absmax = parts.take(self.scale_end, (blocks,), ("float32" if nested is None else "uint8",))
        return FourBitWeight.of(
            *(name, shape, codes), kind=self.kind, state=state, codes=codes, absmax=absmax, table=table, nested=nested
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EightBits(ScaledFormat):
    """Eight bits of bitsandbytes, which are kept as ``int8``."""

    ends: tuple[str, ...] = (".weight", ".weight_format", ".SCB")
    scale_end: str = ".SCB"
    dtype: str | None = "int8"
    form: Format = KINDS["int8"]
    block: tuple[int, None] = (1, None)
    words: str = "int8 with a scale for each output channel (bitsandbytes)"

    def weight(self, name: str, shape: tuple[int, int], parts: WeightTensors) -> ScaledWeight:
        largest = parts.take(".SCB", shape[:1], ("float32",))
        if ".weight_format" in parts.tensors:
            order = parts.take(".weight_format", (), ("uint8",))
            if (found := int(order.read())) != 0:
                raise Refusal(f"{parts.where}/{order.file}: tensor {order.name!r} holds {found}: expected 0, for rows")

        def scales(index: Index) -> np.ndarray:
            # A channel of zeros has 0, which is no scale of int8: with the smallest one, its numbers are as good as 0.
            values = largest.read()[:, None][index]
            return np.where(values == 0, np.finfo(np.float32).tiny, values / np.float32(127))

        return dataclasses.replace(
            super().weight(name, shape, parts),
            scales=ComputedTensor.of(largest, (shape[0], 1), "float32", scales),
        )


def read_bitsandbytes(fields: Fields) -> FourBits | EightBits:
    """The ``quantization_config`` of bitsandbytes, as transformers writes it.

    Raises:
      Refusal: it says something that is not read.
    """
    four, eight = (fields.flag(f"load_in_{bits}bit") for bits in (4, 8))
    for key, value in (("_load_in_4bit", four), ("_load_in_8bit", eight)):
        fields.only(key, value, "as without the _")
    if four == eight:
        raise fields.refuse("load_in_4bit", "true, or load_in_8bit true, and not both")
    plain = read_plain(fields, "llm_int8_skip_modules")
    # How it computes, and what it did when it loaded the model, changes no weight.
    for key in ("llm_int8_enable_fp32_cpu_offload", "bnb_4bit_use_double_quant"):
        fields.flag(key)
    fields.text("bnb_4bit_compute_dtype", None)
    if not isinstance(threshold := fields.raw.get("llm_int8_threshold") or 0, float | int) or threshold < 0:
        raise fields.refuse("llm_int8_threshold", "a number from 0 on")
    kinds = "fp4", "nf4"
    require_one_of(fields, "bnb_4bit_quant_type", *kinds, absent=kinds[0])
    require_one_of(fields, "bnb_4bit_quant_storage", *_STORAGE, absent=_STORAGE[0])
    fields.only("llm_int8_has_fp16_weight", False, "because weights in 16 bits are not quantised")
    if eight:
        return EightBits(plain=plain)
    kind = fields.text("bnb_4bit_quant_type", kinds[0])
    parts = ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", f".quant_state.bitsandbytes__{kind}")
    storage = fields.text("bnb_4bit_quant_storage", _STORAGE[0])
    return FourBits(plain=plain, ends=tuple(f".weight{end}" for end in parts), kind=kind, storage=storage)
