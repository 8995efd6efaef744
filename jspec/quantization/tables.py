"""Tables of sixteen numbers, of which a code of four bits names one: NF4 (Dettmers et al., 2023) and FP4 of bitsandbytes,
and IQ4 of GGUF.

Codes are numbered so that kernels look numbers up with few instructions (``jspec.pallas.weights.table_codes``): those of
codes k and k + 8, times ``factor`` and 2^-126, differ as bfloat16 in the lowest seven bits at most, and k has the larger
magnitude. Of integers, that of k is larger by less than 128. Readers of checkpoints, whose codes are numbered otherwise, go
by ``numbers``."""

from typing import NamedTuple

import ml_dtypes
import numpy as np

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Table(NamedTuple):
    """A table of sixteen numbers.

    Attributes:
      name: in the names of formats.
      numbers: those of codes 0 to 15, of magnitudes up to 1 or integers of eight bits.
      factor: what kernels multiply them by and their sums are divided by: with it, bfloat16 holds them most exactly.
    """

    name: str
    numbers: tuple[float, ...]
    factor: float

    @property
    def integers(self) -> bool:
        """Whether its numbers are integers of eight bits."""
        return all(float(number).is_integer() for number in self.numbers)

    @property
    def bits(self) -> np.ndarray:
        """As the bits of bfloat16, uint16 ``[16]``: ``factor`` times the numbers, times 2^-126."""
        small = np.array(self.numbers) * (self.factor * 2.0**-126)
        return small.astype(np.float32).astype(_BFLOAT16).view(np.uint16)

    def values(self, rounded: bool = False) -> np.ndarray:
        """The numbers, float32 ``[16]``; ``rounded`` to those that kernels multiply by."""
        if rounded:
            return (self.multiples.astype(np.float64) / self.factor).astype(np.float32)
        return np.array(self.numbers, np.float32) + 0  # no 0 has a sign

    @property
    def multiples(self) -> np.ndarray:
        """``factor`` times the numbers, float32 ``[16]`` that bfloat16 holds."""
        return (self.bits.view(_BFLOAT16).astype(np.float64) * 2.0**126).astype(np.float32)


# Quantiles of a normal distribution, as bitsandbytes has them. With this factor, which was searched for, bfloat16 holds them
# with two thirds of the error that it has with 1: 0.0004, the root of its mean square.
NF4 = Table(
    "nf4",
    (
        *(-0.09105003625154495, 0.16093020141124725, -0.28444138169288635, 0.33791524171829224),
        *(-0.5250730514526367, 0.5626170039176941, -1.0, 1.0),
        *(-0.0, 0.07958029955625534, -0.18477343022823334, 0.24611230194568634),
        *(-0.39491748809814453, 0.44070982933044434, -0.6961928009986877, 0.7229568362236023),
    ),
    5.748,
)
# A sign, two bits of exponent and one of mantissa, but with a least magnitude below that of E2M1. With 12 it is exact.
_FP4 = (1 / 192, 1, 6 / 12, 3 / 12), (0, 8 / 12, 4 / 12, 2 / 12)
FP4 = Table("fp4", tuple(sign * number for half in _FP4 for sign in (1.0, -1.0) for number in half), 12.0)
# Of IQ4_NL and IQ4_XS: integers, all of which bfloat16 holds.
_IQ4 = (-104, -65, -35, -10, 13, 38, 69, 113), (-127, -83, -49, -22, 1, 25, 53, 89)
IQ4 = Table("iq4", tuple(float(number) for half in _IQ4 for number in half), 1.0)
TABLES = {one.name: one for one in (NF4, FP4, IQ4)}
