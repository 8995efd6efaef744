"""What rounding costs in acceptance: of a drafter's weights, and of the target's cache of keys and values.

A drafter writes the same prompts twice, as it is and without the rounding. The uncertainty is that of the difference, from
the prompts: each is left out in turn (a jackknife; Tukey, 1958). So whatever moves both figures together, such as a prompt
that is easy to draft, is no part of it."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jspec.checkpoints.checkpoint import Checkpoint
from jspec.config.heads import DraftConfig
from jspec.outputs import Stats, total_stats


@dataclasses.dataclass(frozen=True)
class RoundingCost:
    """Acceptance with something rounded, and without.

    Attributes:
      what: what is rounded, and to what: ``weights of the draft in int8``.
      rounded, whole: the statistics of each prompt with the rounding, and without.

    Example::

        found = jspec.doctor.diagnose("path/to/target", "path/to/int8", draft_reference="path/to/eagle3")
        for cost in found.rounding:
            print(cost.what, cost.difference, cost.error)
    """

    what: str
    rounded: tuple[Stats, ...]
    whole: tuple[Stats, ...]

    @property
    def lengths(self) -> tuple[float, float]:
        """The acceptance lengths with the rounding, and without."""
        return _length(self.rounded), _length(self.whole)

    @property
    def difference(self) -> float:
        """By how much the acceptance length is larger with the rounding; negative in most cases."""
        rounded, whole = self.lengths
        return rounded - whole

    @property
    def error(self) -> float | None:
        """The standard error of ``difference``; None for a single prompt."""
        n = len(self.rounded)
        if n < 2:
            return None
        without = [
            _length([*self.rounded[:i], *self.rounded[i + 1 :]]) - _length([*self.whole[:i], *self.whole[i + 1 :]])
            for i in range(n)
        ]
        return float(np.sqrt((n - 1) * np.var(without)))

    def __str__(self) -> str:
        rounded, whole = self.lengths
        error = "unknown from one prompt" if self.error is None else f"{self.error:.2f}"
        return (
            f"{self.what}: an acceptance length of {rounded:.2f} instead of {whole:.2f}, a difference of "
            f"{self.difference:+.2f} (standard error {error}, {len(self.rounded)} prompts)"
        )


def _length(stats: Sequence[Stats]) -> float:
    return total_stats(stats).mean_acceptance_length


def require_original(original: Checkpoint, draft: Checkpoint):
    """Raise a ValueError unless ``original`` is a draft like ``draft`` whose weights are not quantised."""
    config, quantized = original.config, draft.config
    if config.quantization is not None:
        raise ValueError(
            f"draft_reference={original.folder.given!r}: its weights are {config.formats}: expected the original, "
            "whose weights are not quantised"
        )
    if type(config) is not type(quantized) or _apart_from_quantization(config) != _apart_from_quantization(quantized):
        raise ValueError(
            f"draft_reference={original.folder.given!r}: expected the draft that {draft.folder.given!r} was made from, and "
            "it has another config"
        )


def _apart_from_quantization(config: DraftConfig) -> DraftConfig:
    return config.with_quantization("int8")  # any, for both
