"""The config of gated delta nets, recurrent layers that stand in the place of attention."""

import dataclasses
from collections.abc import Mapping

from jspec._validation import FieldChecks

FLOAT32_BYTES = 4


@dataclasses.dataclass(frozen=True)
class DeltaNets:
    """Gated delta nets (Yang et al., 2024) in some layers of a model, in the place of attention.

    Such a layer caches no keys and values. It keeps a matrix of each value head and row, whose size does not depend on the
    length of the text (``jspec.pallas.delta_net``).

    Attributes:
      key_heads: Nk, how many heads of queries and keys there are.
      value_heads: Nv, how many heads of values there are, a multiple of Nk.
      key_size: Dk, the size of a query and of a key.
      value_size: Dv, the size of a value.
      taps: W, how many tokens the short convolution reads.
      layers: for each layer of the model, whether it has a gated delta net.

    Example::

        qwen3_5_27b = DeltaNets(16, 48, 128, 128, taps=4, layers=(True, True, True, False) * 16)
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int
    layers: tuple[bool, ...]

    def __post_init__(self):
        check = FieldChecks(self, "delta_nets.")
        check.sizes("key_heads", "value_heads", "key_size", "value_size", "taps")
        check.require("taps", self.taps >= 2, "at least 2, as a convolution reads earlier tokens")
        whole = self.value_heads % self.key_heads == 0
        check.require("value_heads", whole, f"a multiple of the {self.key_heads} heads of keys")
        flags = isinstance(self.layers, tuple) and all(isinstance(flag, bool) for flag in self.layers)
        check.require("layers", flags, "a tuple of True or False, one a layer")

    def require_fit(self, num_layers: int):
        """Raise a ValueError unless ``layers`` tells of each layer of a model, and leaves some of them their attention."""
        check = FieldChecks(self, "delta_nets.")
        check.require("layers", len(self.layers) == num_layers, f"{num_layers} entries, one a layer")
        some = any(self.layers) and not all(self.layers)
        check.require("layers", some, "some layers with gated delta nets, and some with attention")

    @property
    def channels(self) -> int:
        """How many numbers of a token the convolution reads: queries, keys and values."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def dimensions(self) -> Mapping[str, int]:
        """Dimension letter -> size."""
        return {
            "Nk": self.key_heads,
            "Nv": self.value_heads,
            "Dk": self.key_size,
            "Dv": self.value_size,
            "Wc": self.taps,
        }

    def local(self, shards: int) -> "DeltaNets":
        """The heads of one of so many shards."""
        return dataclasses.replace(self, key_heads=self.key_heads // shards, value_heads=self.value_heads // shards)

    def row_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes of what all layers keep of one row, whose verify passes have up to so many query tokens, at ``itemsize``
        bytes a number of activations."""
        state = self.value_heads * self.key_size * self.value_size
        pending = self.key_heads * self.key_size + self.value_heads * (self.value_size + 1)
        columns = (self.taps - 1 + tokens) * self.channels * itemsize
        return sum(self.layers) * ((state + 2 * tokens * pending) * FLOAT32_BYTES + columns)
