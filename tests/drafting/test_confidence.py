"""The output of a confidence head for a draft is known before that draft is drawn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import CONFIG, MAX_LEN, TARGET, entered, ragged_prompts, target
from heads import VARIANTS, random_head, serving
from step_requests import never, request

from jspec.config import Speculation
from jspec.drafting.methods import drafter_for
from jspec.engine.runner.state import init_state
from jspec.engine.runner.step import DecodeStep
from jspec.engine.runner.step_io import PrefillInputs
from jspec.models.flatten import flatten

K, ROWS, SEEDS = 4, CONFIG.max_batch, 12
(PROMPT,) = ragged_prompts((6,))


def proposals(config):
    """Of rows with one text and noise of their own, fields ``[SEEDS * ROWS, K, ...]``; and the draft head."""
    head = random_head(config)
    leaves, merge = flatten(serving(config, head))
    make = drafter_for(config, TARGET, Speculation(K, draft_sampling="sample"))

    def step(leaves) -> DecodeStep:
        return DecodeStep(target(), make(target(), merge(leaves)), never, K + 1)

    @jax.jit
    def drafted(leaves, state, keys):
        state = dataclasses.replace(state, request=dataclasses.replace(state.request, key_data=keys))
        proposal = step(leaves).draft(state)[1]
        return proposal.tokens, proposal.confidence, proposal.count

    state = init_state(CONFIG, target(), make(target(), serving(config, head)), jnp.float32)
    padded = np.pad(np.array(PROMPT, np.int32), (0, MAX_LEN - len(PROMPT)))
    prefill = jax.jit(lambda leaves, *args: step(leaves).prefill(*args))
    for row in range(ROWS):
        entry = request(row, len(PROMPT))
        tokens = padded[None, : CONFIG.prefill_chunk + 1]
        where = np.array([0]), np.array([len(PROMPT) - 1]), entry.table[None]
        state = entered(prefill(leaves, state, PrefillInputs(np.array([row]), tokens, *where)), row, padded, entry)
    keys = jax.random.bits(jax.random.key(0), (SEEDS, ROWS, 2), jnp.uint32)
    found = [drafted(leaves, state, key) for key in keys]
    return head, [np.concatenate(field) for field in zip(*found, strict=True)]


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(VARIANTS["dspark"], confidence="markov"),
        dataclasses.replace(VARIANTS["dspark-vanilla"], confidence="markov"),
        VARIANTS["dspark-rnn"],
    ],
    ids=["anchor first", "anchor apart", "of hidden states"],
)
def test_confidence_depends_on_the_drafts_before(config):
    head, (tokens, confidence, count) = proposals(config)
    assert (count == K).all()
    assert ((confidence > 0) & (confidence < 1)).all()
    pairs, reads_drafts = 0, head.config.confidence == "markov"
    for i, j in zip(*np.triu_indices(len(tokens), 1), strict=True):
        same = int(np.cumprod(tokens[i] == tokens[j]).sum())
        np.testing.assert_allclose(confidence[i, : same + 1], confidence[j, : same + 1], atol=1e-6)
        if same < K - 1:
            pairs += 1
            differ = abs(confidence[i, same + 1] - confidence[j, same + 1]) > 1e-6
            assert differ == reads_drafts
    assert pairs > 100
