"""A draft model with gated delta nets: whatever becomes of its drafts, the next ones are those of a pass over the text.

Rounds are made by hand here, so that any number of drafts can be accepted in any row.
``tests/engine/test_recurrent_drafts.py`` has those of an engine."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafts_of_whole_passes import check_drafts
from engines import MAX_LEN, V, hybrid_draft
from tiers import in_tiers

from jspec.config import Speculation
from jspec.drafting.base import Context, Prompt, Text
from jspec.drafting.draft_model import DraftModel
from jspec.drafting.recurrent import DraftRows, Reading, RecurrentDraft
from jspec.models import build, flat_params
from jspec.models.kv_cache import PagedView
from jspec.pallas.delta_net.state import PrefillRows
from jspec.sampling.distribution import Warp
from jspec.sampling.processors import Processing
from jspec.sampling.streams import RoundNoise

pytestmark = pytest.mark.usefixtures("states_in_chunks")
K, P = 4, 8
BS = 4  # rows of the states, of which a round has B
B = 3
TABLE = 1 + np.arange(BS * MAX_LEN // P, dtype=np.int32).reshape(BS, -1)


@functools.cache
def draft_model(positions: int):
    return build(dataclasses.replace(hybrid_draft().config, max_position=positions), flat_params(hybrid_draft()))


def of_rows(state: RecurrentDraft, row) -> RecurrentDraft:
    """The state as a drafter takes it for the rows of a call."""
    return dataclasses.replace(state, rows=jax.tree.map(lambda x: jnp.take(x, row, axis=0, mode="clip"), state.rows))


def with_rows(state: RecurrentDraft, row, new: RecurrentDraft) -> RecurrentDraft:
    """The state of all rows after such a call."""
    return RecurrentDraft(new.layers, jax.tree.map(lambda x, y: x.at[row].set(y, mode="drop"), state.rows, new.rows))


class Rounds:
    """Rounds of a draft model over texts that this class continues as it likes.

    Attributes:
      texts: the committed tokens of each row.
      previous: of each row, as ``Context.previous``.
      checked, accepted: how many drafts were looked at, and were accepted.
    """

    def __init__(self, positions: int = 64, seed: int = 0):
        self.model, self.rng = draft_model(positions), np.random.default_rng(seed)
        drafter = self._drafter(K)
        self.state = drafter.init(1 + TABLE.size, P, jnp.float32, BS)
        self.texts: list[list[int]] = [[] for _ in range(BS)]
        self.previous = [0] * BS
        self.checked = self.accepted = 0
        self._propose = {most: jax.jit(functools.partial(self._traced, most)) for most in (K, 1)}
        self._prefill, self._catch_up = jax.jit(self._drafter(K).prefill), jax.jit(self._traced_catch_up)
        for row in range(BS):
            self.begin(row)

    def _drafter(self, most: int) -> DraftModel:
        return DraftModel(self.model, V, Speculation(most, draft_sampling="sample"))

    def begin(self, row: int):
        """Another text takes the place of the row's."""
        prompt = self.rng.integers(V, size=int(self.rng.choice([1, 2, 5, 6, 11]))).tolist()
        self.texts[row], self.previous[row] = prompt, len(prompt) - 1
        if len(prompt) > 1:
            self.prefill(row, prompt)
        admitted = DraftRows.of_admitted(jnp.asarray([len(prompt)], jnp.int32), K + 1)
        self.state = with_rows(self.state, np.array([row]), RecurrentDraft(self.state.layers, admitted))
        if self.rng.random() < 0.3:
            self.texts[row] += self.rng.integers(V, size=2).tolist()  # plain rounds, before any other
            self.catch_up(row)

    def prefill(self, row: int, prompt: list[int]):
        tokens, start = np.zeros((1, 12), np.int32), np.arange(12, dtype=np.int32)[None]
        tokens[0, : len(prompt)] = prompt
        rows = PrefillRows(*(jnp.asarray([x]) for x in (np.int32(row), np.int32(len(prompt) - 1), True, False)))
        view = PagedView(jnp.asarray(TABLE[[row]]), jnp.asarray(start), start < len(prompt) - 1, recurrent=rows)
        tokens = jnp.asarray(tokens)
        self.state = self._prefill(self.state, Prompt(tokens, jnp.roll(tokens, -1, axis=1), None, view))

    def text(self, rows) -> Text:
        tokens = np.zeros((len(rows), MAX_LEN), np.int32)
        for b, row in enumerate(rows):
            tokens[b, : len(self.texts[row % BS])] = self.texts[row % BS]
        length = jnp.asarray([len(self.texts[row % BS]) for row in rows], jnp.int32)
        return Text(jnp.asarray(tokens), length, jnp.asarray(rows, jnp.int32))

    def catch_up(self, row: int):
        self.state = self._catch_up(self.state, self.text([row]), jnp.asarray([self.previous[row]], jnp.int32))
        self.previous[row] = len(self.texts[row]) - 1

    def _traced(self, most: int, state, text: Text, live, room):
        drafter, one = self._drafter(most), jnp.ones(B, jnp.float32)
        context = Context(
            tokens=text.tokens,
            length=text.length,
            previous=text.length - 1,
            features=None,
            live=live,
            room=jnp.where(live, jnp.minimum(room, most), 0),
            table=jnp.asarray(TABLE)[text.row % BS],
            warp=Warp(one, jnp.zeros(B, jnp.int32), one, 0 * one),
            processing=Processing(None, jnp.full((B, 1), -1), jnp.zeros(B, jnp.int32), text.tokens, text.length),
            noise=RoundNoise(jnp.stack([text.row.astype(jnp.uint32)] * 2, axis=1), text.length),
            row=text.row,
        )
        new, proposal = drafter.propose(of_rows(state, text.row), context)
        assert proposal.distribution is not None
        return with_rows(state, text.row, new), proposal.tokens, proposal.count, proposal.distribution.log_probs

    def _traced_catch_up(self, state, text: Text, previous):
        positions = previous[:, None] - 1 + jnp.arange(K + 1, dtype=jnp.int32)[None]
        valid = (positions >= 0) & (positions < text.length[:, None] - 1)
        view = PagedView(jnp.asarray(TABLE)[text.row % BS], positions, valid)
        tokens = text.tokens_at(positions)
        new = self._drafter(K).prefill(of_rows(state, text.row), Prompt(tokens, tokens, None, view, text))
        return with_rows(state, text.row, new)

    def make(self, count: int):
        """So many rounds."""
        for _ in range(count):
            self.round()

    def round(self):
        """One round of some rows, each of which ends in some way."""
        rng, most = self.rng, int(self.rng.choice([K, K, 1]))
        rows, live = rng.permutation(BS)[:B], rng.random(B) < 0.9
        rows = np.where(rng.random(B) < 0.9, rows, BS)
        live &= rows < BS
        text, room = self.text(rows), rng.integers(0, K + 1, size=B)
        self.state, tokens, count, log_probs = self._propose[most](
            self.state, text, jnp.asarray(live), jnp.asarray(room)
        )
        drafts, count = np.asarray(tokens), np.where(live, count, 0)
        check_drafts(np.asarray(text.tokens), np.asarray(text.length), drafts, count, np.asarray(log_probs))
        self.checked += int(count.sum())
        for b, row in enumerate(rows):
            if live[b]:
                self.end(int(row), drafts[b, : count[b]].tolist())

    def end(self, row: int, drafts: list[int]):
        """Some drafts stand, or all, or none; or they are dropped, or others take their place; or the text has ended."""
        rng, text = self.rng, self.texts[row]
        how = rng.choice(["some", "all", "dropped", "others"], p=[0.5, 0.3, 0.1, 0.1])
        if how == "dropped":
            return
        stand = drafts[: int(rng.integers(len(drafts) + 1))] if how == "some" else drafts
        self.accepted += len(stand)
        if how == "others":
            stand = rng.integers(V, size=len(drafts)).tolist()
        self.previous[row] = len(text)
        text += [*stand, int(rng.integers(V))]
        if len(text) > MAX_LEN - K - 1:
            self.begin(row)
        elif how == "others":
            self.catch_up(row)


def test_drafts_are_those_of_a_pass_over_the_text():
    rounds = Rounds()
    rounds.make(100)
    assert rounds.checked > 250
    assert rounds.accepted > 100


@pytest.mark.nightly
def test_a_draft_model_with_fewer_positions_drafts_up_to_their_end():
    rounds = Rounds(positions=20)
    rounds.make(80)
    assert rounds.checked > 50


# Faults that the check above has to see.


def in_verify_pass(**change):
    """The first pass of a round with other fields of its ``VerifyRows``, each a function of the right one."""
    begin = DraftRows.begin

    def wrong(rows: DraftRows, *args):
        right, reading = begin(rows, *args)
        return dataclasses.replace(
            right, **{name: make(getattr(right, name)) for name, make in change.items()}
        ), reading

    return DraftRows, "begin", wrong


def joined_too_early():
    """Drafts take the places of the tokens before them."""
    append = Reading.append
    return Reading, "append", lambda reading, i, reads: append(reading, i - 1, reads)


FAULTS = {
    "one token too many": in_verify_pass(accepted=lambda count: jnp.minimum(count + 1, K + 1)),
    "the rejected drafts": in_verify_pass(accepted=lambda count: jnp.full_like(count, K)),
    "as many as in another row": in_verify_pass(accepted=lambda count: jnp.roll(count, 1)),
    "the half of another round": in_verify_pass(half=lambda half: 1 - half),
    "a row that is not reset": in_verify_pass(fresh=jnp.zeros_like),
    "a draft that joins too early": joined_too_early(),
}


@pytest.mark.parametrize("fault", in_tiers(FAULTS, test=("one token too many", "a row that is not reset")))
def test_a_wrong_rollback_is_detected(fault, monkeypatch):
    monkeypatch.setattr(*FAULTS[fault])
    rounds = Rounds()
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        rounds.make(60)
