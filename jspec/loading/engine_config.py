"""The settings of an engine for a target and its draft, of which a caller leaves some open."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jspec._validation import is_int, require
from jspec.config import EngineConfig, ModelConfig
from jspec.config.engine import PASS_TOKENS
from jspec.config.heads import DraftConfig

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


def engine_config(
    fields: Mapping[str, Any], target: ModelConfig, draft: DraftConfig | None, trees: bool = False
) -> EngineConfig:
    """The settings of an engine for a target and its draft; what is left open is chosen for these and the device.

    ``trees`` of drafts, which are for few requests at a time, are reproducible where that is asked for, because shapes are
    pinned then."""
    fields = dict(fields)
    if fields.get("reproducible") is None:
        fields["reproducible"] = not trees
    chooses = fields.get("max_len") is None
    if chooses:
        depends_on_memory = fields.get("reproducible") is False  # so that this is the longest to choose from
        length = own_length(target) if depends_on_memory else reproducible_length(target, jax.default_backend())
        fields["max_len"] = length
    longest, max_len = target.max_position, fields["max_len"]
    fits = not is_int(max_len) or max_len <= longest  # EngineConfig speaks of what is no integer
    require(fits, "max_len", max_len, f"at most {longest}, the positions the target has")
    if fields.get("dtype") is None:
        fields["dtype"] = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    config = EngineConfig(**fields)
    if chooses:
        config = dataclasses.replace(config, max_len=within_pool(config.max_len, config))
    if config.prefill_tokens is None and jax.default_backend() != "gpu":
        # A CPU is no faster at larger batches, and runs every size of them at warm-up, padding included.
        config = dataclasses.replace(config, prefill_tokens=max(PASS_TOKENS["pinned"], config.chunk))
    return config.for_target(target, None if draft is None else draft.language_model)
