"""MXFP4 weights of linear maps, as compressed-tensors (llm-compressor) writes them in ``mxfp4-pack-quantized``.

A code has four bits, a sign and one of eight magnitudes (E2M1). Two are in a byte, the first in its lower half. Each 32
input features of an output channel share a power of two, a byte n that stands for 2^(n - 127) (E8M0). Experts of gpt-oss are
stored otherwise, and are read in ``jspec.checkpoints.tensors.stacked_experts``."""

import dataclasses

import numpy as np

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.ranges import Index
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.quantized.config_fields import require_one_of
from jspec.checkpoints.quantized.e2m1 import E2M1Format, E2M1Weight, require_whole_groups
from jspec.checkpoints.quantized.format import StoredParts, WeightTensors, read_plain
from jspec.quantization.formats import KINDS
from jspec.quantization.mxfp4 import GROUP, LARGEST_SCALE, twice_powers

CODES, SCALES = ".weight_packed", ".weight_scale"
_DTYPES = ("torch.uint8", "uint8")  # of scales, as compressed-tensors calls that of E8M0


@dataclasses.dataclass(frozen=True)
class MXFP4Weight(E2M1Weight):
    """A weight ``[out, in]``, each number of which is that of a code times the power of two of its group.

    Attributes:
      scales: uint8 ``[out, in / 32]``.
    """

    @property
    def group(self) -> int:
        return GROUP

    def stored(self) -> StoredParts:
        return StoredParts(KINDS["mxfp4"], self.repacked, self.scales)

    def factors(self, rows: slice, groups: slice) -> np.ndarray:
        return twice_powers(self.read_scales((rows, groups))) / 2

    def read_scales(self, index: Index = ()) -> np.ndarray:
        """The scales of groups, uint8. A scale of 0 is valid, which llm-compressor writes for groups of zeros."""
        scales = self.scales.read_part(index)
        if (largest := scales.max(initial=0)) > LARGEST_SCALE:
            raise Refusal(
                f"{self.scales.file}: tensor {self.scales.name!r} holds the scale {largest}: expected at most "
                f"{LARGEST_SCALE}, for weights up to {6 * 2 ** (LARGEST_SCALE - 127)}; 255 is no number in MXFP4"
            )
        return scales


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP4(E2M1Format):
    """MXFP4 of linear maps."""

    ends: tuple[str, ...] = (CODES, SCALES)

    @property
    def summary(self) -> str:
        return f"MXFP4, four bits with a power of two for each {GROUP} input features"

    def weight(self, name: str, shape: tuple[int, int], parts: WeightTensors) -> MXFP4Weight:
        outputs, inputs = shape
        require_whole_groups(parts.module, inputs, GROUP, parts.where)
        codes = parts.take(CODES, (outputs, inputs // 2), ("uint8",))
        scales = parts.take(SCALES, (outputs, inputs // GROUP), ("uint8",))
        return MXFP4Weight(name, codes.file, codes.path, shape, "float32", codes, scales)


def read_mxfp4_pack_quantized(fields: Fields, weights: Fields) -> MXFP4:
    """The ``quantization_config`` of compressed-tensors with ``format: mxfp4-pack-quantized``.

    Args:
      fields: the whole of it.
      weights: what it says of the weights of all linear maps.

    Raises:
      Refusal: it says something that is not read.
    """
    for name, only in (("num_bits", 4), ("type", "float"), ("strategy", "group"), ("group_size", GROUP)):
        require_one_of(weights, name, only)
    require_one_of(weights, "symmetric", True, absent=True)
    require_one_of(weights, "dynamic", False, absent=False)
    require_one_of(weights, "actorder", False, "weight", "static", absent=False)
    require_one_of(weights, "scale_dtype", *_DTYPES, absent=_DTYPES[0])
    plain, key = read_plain(fields, "ignore")
    return MXFP4(plain=plain, key=key, where=fields.where)
