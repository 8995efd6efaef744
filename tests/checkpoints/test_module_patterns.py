"""Patterns of modules that a checkpoint brings: whatever they are, matching them ends soon."""

import re
import time

import pytest

from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.huggingface import quantization_fields
from jspec.checkpoints.huggingface.quantization_fields import MAX_PATTERNS, MAX_SECONDS, Modules

NAMES = [f"model.layers.{i}.block_sparse_moe.experts.{j}.down_proj" for i in range(60) for j in range(128)]
HOSTILE = r"[a-z_0-9.]*[a-z_0-9.]*[a-z_0-9.]*z"


def modules(*patterns) -> Modules:
    return Modules(frozenset(), tuple(map(re.compile, patterns)), "ignore")


def test_the_slowest_patterns_are_given_up():
    assert quantization_fields._SIMPLE.fullmatch(HOSTILE)
    ignored, began = modules(*[HOSTILE] * MAX_PATTERNS), time.thread_time()
    with pytest.raises(Refusal, match=r"ignore has patterns whose matching takes more than 2 s.*list the names"):
        [ignored.include([name]) for name in NAMES]
    assert time.thread_time() - began < 2 * MAX_SECONDS


def test_patterns_in_use_take_no_time():
    ignored, began = (
        modules(r".*lm_head", r".*self_attn\.(q|k|v)_proj$", r"model\.layers\.\d+\.mlp\.gate$"),
        time.thread_time(),
    )
    assert not any(ignored.include([name]) for name in NAMES)
    assert ignored.include(["model.layers.3.mlp.gate"])
    assert time.thread_time() - began < MAX_SECONDS / 4
