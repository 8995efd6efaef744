"""What ``decoder_layer_kernel`` is compiled for: sizes, and how the work is cut."""

import dataclasses

import jax.numpy as jnp
from jax.experimental import pallas as pl

_SMALLEST = 16  # side of a matrix that tensor cores multiply
_WIDE = 64  # rows that a group of warps multiplies straight from shared memory


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the work is cut; results depend on it in the last bits.

    Attributes:
      tile: bytes of weights that a program loads at a time, at most.
      chains: sums that a product is made of, so that one need not wait for another.
      swapped: products are outputs by tokens rather than tokens by outputs.
      slots: of the cache that a program loads at a time.
      ahead: bytes of the next weights that a program has fetched before it waits for the others.
      ahead_of_attention: the same, before attention.
      warps, stages: of the kernel; stages count the tiles under way.
      per_core: programs on each multiprocessor.
      programs: how many share the work; None takes ``per_core`` on every multiprocessor.
      fused: one launch, or one per phase.
    """

    tile: int = 16384
    chains: int = 4
    swapped: bool = False
    slots: int = 64
    ahead: int = 65536
    ahead_of_attention: int = 262144
    warps: int = 4
    stages: int = 4
    per_core: int = 1
    programs: int | None = None
    fused: bool = True


def padded(rows: int) -> int:
    """Rows of a matrix that tensor cores multiply."""
    return max(_SMALLEST, pl.next_power_of_2(rows))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a kernel is compiled for; letters as in ``jspec.config``, P the page size."""

    B: int
    T: int
    D: int
    N: int
    G: int
    H: int
    P: int
    programs: int
    splits: int
    eps: float
    window: int | None
    dtype: jnp.dtype
    tiling: Tiling

    @property
    def tokens(self) -> int:
        """M."""
        return self.B * self.T

    @property
    def block(self) -> int:
        """M, padded."""
        return padded(self.tokens)

    def each(self, outputs: int) -> int:
        """How many outputs a program computes."""
        return 8 * pl.cdiv(pl.cdiv(outputs, self.programs), 8)

    def share(self, outputs: int):
        """The program's share of outputs: int32 ``[n]``, and which of them are real."""
        each = self.each(outputs)
        index = jnp.arange(max(_WIDE if self.tiling.swapped else _SMALLEST, pl.next_power_of_2(each)), dtype=jnp.int32)
        first = pl.program_id(0) * each
        return first + index, (index < each) & (first + index < outputs)
