"""``StoredQuantization``: weights in FP8 or int8 that are kept as they are stored."""

import dataclasses
from collections.abc import Iterable
from typing import Literal

from jspec.checkpoints.quantized.config_fields import Modules

EVERY_LINEAR = Modules(frozenset(("Linear",)), (), "")


@dataclasses.dataclass(frozen=True)
class StoredQuantization:
    """How the weights in the files are quantised.

    Attributes:
      quantization: the value of ``ModelConfig.quantization`` that they can be read as.
      scales: whether there is a scale for each output ``channel``, or one for a whole ``tensor``.
      targets: which modules are quantised.
      ignored: which of these are not, after all.
      where: the file that says so, for messages.
    """

    quantization: Literal["fp8", "int8"]
    scales: Literal["channel", "tensor"]
    targets: Modules
    ignored: Modules
    where: str

    def includes(self, names: Iterable[str]) -> bool:
        """Whether a linear map is quantised, to which the checkpoint may give any of these names."""
        names = tuple(names)
        return self.targets.include(names) and not self.ignored.include(names)
