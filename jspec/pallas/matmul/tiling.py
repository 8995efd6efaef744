"""The tile sizes of the matmul kernels."""

import dataclasses

from jax.experimental import pallas as pl


@dataclasses.dataclass(frozen=True)
class MatmulTiling:
    """The tile sizes of a matmul.

    Attributes:
      outputs: output features of a program instance, a power of two, at least 16.
      tokens: tokens of an instance, a power of two, at least 16.
      inputs: input features that an instance reads at a time, a power of two, at least 32; for weight-only matmuls at
        least 64, and with groups that share a scale 128.
      num_warps: warps of an instance.
      num_stages: how many reads are under way at once, and one more.
      weight_first: whether the weight is the left operand, of which four warps multiply 64 lines at once. Otherwise the
        tokens are, and ``outputs`` may be fewer. Weight-only matmuls have the weight first.
      num_splits: split-K, how many instances share the inputs of the same results. Each of them stores partial sums.
      ordered: of weight-only matmuls of eight bits, whether x is read from memory in the order in which it is multiplied,
        in pairs of inputs. Otherwise it is read in 16 bytes at a time and passes through shared memory twice.
    """

    outputs: int
    tokens: int
    inputs: int
    num_warps: int
    num_stages: int
    weight_first: bool = True
    num_splits: int = 1
    ordered: bool = False

    def grid(self, tokens: int, outputs: int) -> tuple[int, int, int]:
        """The program instances. Those that read the same weights for other tokens run side by side, and find them in the
        L2 cache."""
        return pl.cdiv(tokens, self.tokens), pl.cdiv(outputs, self.outputs), self.num_splits

    def split_inputs(self, inputs: int) -> int | None:
        """How many of the inputs a split has; None without split-K."""
        trips = pl.cdiv(pl.cdiv(inputs, self.inputs), self.num_splits)
        return trips * self.inputs if self.num_splits > 1 else None
