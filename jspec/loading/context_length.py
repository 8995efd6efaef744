"""The context length of an engine whose ``max_len`` the caller left open."""

from jspec.config import EngineConfig, ModelConfig

LADDER = tuple(2**i for i in range(30, 10, -1))  # ..., 8,192, 4,096, 2,048
# Under ``reproducible`` the length must not depend on how much memory happens to be free. On a CPU attention reads all
# ``max_len`` slots of every row, used or not, so a long context makes even short texts slow there.
LONGEST_REPRODUCIBLE = {"gpu": 32_768, "cpu": 8_192}


def own_length(target: ModelConfig) -> int:
    """The number of positions that a target states.

    Of a target with a ``longrope`` only the original positions count: past them other rotation factors would apply to every
    text, short ones included (``Rope.for_length``), so a longer context needs an explicit ``max_len``.
    """
    ropes = [rope for rope in (target.rope, *target.layer_ropes) if rope is not None and rope.kind == "longrope"]
    return min([target.max_position, *(rope.original_max_position for rope in ropes)])


def reproducible_length(target: ModelConfig, platform: str) -> int:
    """The context length of a reproducible engine, which follows from the target and the kind of device alone."""
    return min(own_length(target), LONGEST_REPRODUCIBLE.get(platform, LONGEST_REPRODUCIBLE["gpu"]))


def within_pool(length: int, config: EngineConfig) -> int:
    """A context length, cut to what all pages of the pool hold together where their number is given."""
    return length if config.num_pages is None else max(min(length, config.num_pages * config.page_size), 2)


def lengths_up_to(longest: int) -> list[int]:
    """The context lengths that an engine may choose from, in descending order: ``longest``, and the steps of ``LADDER``
    below it."""
    return [longest, *(step for step in LADDER if step < longest)]
