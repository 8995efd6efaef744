"""Which tokens end a text."""

import dataclasses
import types

import pytest
from engines import TARGET

from jspec.engine.frontend import end_tokens


@pytest.mark.parametrize(
    ("known", "own", "expected"),
    [((2,), 2, (2,)), ((2,), 7, (2, 7)), ((), 7, (7,)), ((2,), None, (2,)), ((2,), 10**6, (2,)), ((2,), -1, (2,))],
)
def test_the_tokenizers_own_end_token_ends_a_text(known, own, expected):
    """As in vLLM; some checkpoints name it in tokenizer_config.json alone. One outside of the vocabulary cannot come."""
    config = dataclasses.replace(TARGET, eos_token_ids=known)
    assert end_tokens(config, types.SimpleNamespace(eos_token_id=own)) == expected
    assert end_tokens(config, None) == known
