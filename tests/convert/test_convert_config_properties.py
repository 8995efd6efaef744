"""Any config gives a model config or a refusal, and a rope is written as it is read."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import ARCHITECTURES, tiny_config

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.huggingface.config import read_config
from jspec.checkpoints.huggingface.rope import read_rope, write_rope
from jspec.config import Rope

INTEGER_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
    "max_window_layers",
    "bos_token_id",
    "eos_token_id",
)
ANYTHING = st.one_of(
    st.integers(-3, 300),
    st.integers(),
    st.sampled_from([2**31 - 1, 2**31, 2**63, 10**300]),
    st.floats(),
    st.booleans(),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=2),
)


@settings(
    max_examples=200,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    architecture=st.sampled_from(ARCHITECTURES),
    overrides=st.dictionaries(st.sampled_from(INTEGER_FIELDS), ANYTHING, max_size=3),
)
def test_any_integers_give_a_config_or_a_refusal(tmp_path, architecture, overrides):
    """Whatever stands in the integer fields: a consistent config, or one sentence; nothing else is raised."""
    text = json.dumps({**tiny_config(architecture), "use_sliding_window": True, **overrides})
    (tmp_path / "config.json").write_text(text)
    try:
        config = read_config(Folder(tmp_path))
    except Refusal:
        return
    assert config.num_heads % config.num_kv_heads == 0
    assert 0 < config.num_parameters <= 2**44
    assert len(config.windows) == config.num_layers
    assert all(0 <= token < config.vocab_size for token in config.eos_token_ids)


@pytest.mark.parametrize(
    "rope",
    [
        Rope(theta=5e5),
        Rope(kind="linear", factor=2.0),
        Rope(kind="dynamic", factor=4.0),
        Rope(kind="llama3", factor=8.0, high_freq_factor=5.0, original_max_position=64),
        Rope(
            kind="longrope", original_max_position=64, attention_factor=1.1, short_factors=(1, 2), long_factors=(3, 4)
        ),
        Rope(kind="yarn", factor=8.0, original_max_position=64, beta_fast=16.0, attention_factor=1.25, truncate=False),
    ],
    ids=lambda rope: rope.kind,
)
def test_rope_is_written_as_it_is_read(rope):
    assert read_rope(Fields({**write_rope(rope), "max_position_embeddings": 2048}, "config.json")) == rope
