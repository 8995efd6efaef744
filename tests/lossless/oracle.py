"""What a step should do: the distribution of its texts, how many drafts a round has, and how many it accepts."""

import dataclasses
import functools

import numpy as np

from lossless.distributions import (
    Model,
    Options,
    Warp,
    agreement,
    completion_distribution,
    distribution,
    processed,
    round_distribution,
)
from lossless.steps import ARGMAX_BELOW, BESIDE, CORPUS, NGRAM, Ask, K, N, Program
from lossless.table_model import V, context, stored


@dataclasses.dataclass(frozen=True)
class Oracle:
    """The distributions that the requests of one kind should follow under a program."""

    program: Program
    ask: Ask
    tables: tuple[np.ndarray, np.ndarray]

    @functools.cached_property
    def target(self) -> Model:
        return self._model(self.tables[0], self.ask.warp, np.float64, self.ask.options)

    @functools.cached_property
    def draft_model(self) -> Model:
        how, warp = self.program, self.ask.warp
        temperature = warp.temperature if how.draft_temperature is None else how.draft_temperature
        if how.draft_sampling == "argmax" or (how.draft_sampling == "auto" and warp.temperature < ARGMAX_BELOW):
            temperature = 0.0
        warp = dataclasses.replace(warp, temperature=temperature)
        options = dataclasses.replace(self.ask.options, grammar=None)  # which the drafter does not know
        table = self.tables[1][:, : how.draft_vocab]
        if how.draft_tokens is not None:
            table = np.where(np.isin(np.arange(V), how.draft_tokens), table, -np.inf)
        return self._model(table, warp, stored(0.0).dtype, options)

    def _model(self, table, warp: Warp, dtype, options: Options) -> Model:
        """A model of a table, whose processed logits are rounded to ``dtype``."""
        prompt_length = len(self.ask.prompt)

        @functools.cache
        def of(history):
            logits = processed(table[context(history)], history, prompt_length, options)
            logits = logits.astype(dtype).astype(np.float64)
            if len(history) < prompt_length + self.ask.min_tokens:
                logits[list(self.ask.stop_tokens)] = -np.inf
            return np.pad(distribution(logits, warp), (0, V - len(logits)))

        return of

    @functools.cached_property
    def texts(self) -> np.ndarray:
        """Joint distribution of N tokens, ``[V + 1] * N``."""
        return completion_distribution(self.target, self.ask.prompt, N, self.ask.stop_tokens)

    def drafts(self, history) -> tuple[int, Model]:
        """How many drafts a round after this history has, and their distribution."""
        most = K if self.ask.max_drafts is None else self.ask.max_drafts
        room, length = min(K, most, self.program.slots - 1 - len(history)), len(history)
        beside = prompt_lookup(history, K, BESIDE) if self.program.lookup else ()
        if beside:
            return room, lambda seen: np.eye(V)[beside[len(seen) - length]]
        return self._own_drafts(history, room)

    def jump_forward(self, history) -> tuple[int, ...]:
        """The jump-forward tokens after this history, which take the place of as many of the drafter's drafts."""
        if self.ask.options.grammar is None or self.program.method == "none":
            return ()
        most = K if self.ask.max_drafts is None else self.ask.max_drafts
        room = min(K, most, self.program.slots - 1 - len(history))
        return self.ask.options.grammar.jump_forward_after(history[len(self.ask.prompt) :], max(room, 0))

    def _own_drafts(self, history, room: int) -> tuple[int, Model]:
        """The drafts that the drafter makes."""
        length = len(history)
        if self.program.method == "draft_model":
            return min(room, max(self.program.draft_positions - length + 1, 0)), self.draft_model
        copied = ()
        if self.program.method.startswith("ngram"):
            copied = prompt_lookup(history, K)
        if self.program.method == "ngram_corpus":
            copied = copied or corpus_lookup(history, K)
        return min(room, len(copied)), lambda seen: np.eye(V)[copied[len(seen) - length]]

    def rounds(self, history) -> np.ndarray:
        """Joint distribution of how many drafts a round after this history has, and accepts, ``[K + 1, K + 1]``.

        Drafts behind jump-forward tokens stand if the drafter has drawn these as well.
        """
        count, draft = self.drafts(history)
        fixed, length = self.jump_forward(history), len(history)

        def either(seen):
            i = len(seen) - length
            return np.eye(V)[fixed[i]] if i < len(fixed) else draft(seen)

        drawn = [draft((*history, *fixed[:i]))[token] if i < count else 0.0 for i, token in enumerate(fixed)]
        if self.program.draft_sampling == "coupled":
            return self._coupled_rounds(history, fixed, drawn)
        same, probabilities = float(np.prod(drawn)), np.zeros((K + 1, K + 1))
        for drafted, share in ((count, same), (len(fixed), 1 - same)):
            if share:
                probabilities[drafted] += share * self._accepted(history, either, drafted)
        return probabilities

    def _coupled_rounds(self, history, fixed, drawn) -> np.ndarray:
        """``rounds`` where the noise of a draft is that of the target's own token, which decides what is accepted.

        Args:
          history: the text when the round begins.
          fixed: the jump-forward tokens.
          drawn: the probability of each of them that the drafter draws it behind those before it.
        """
        (count, draft), probabilities = self.drafts(history), np.zeros((K + 1, K + 1))
        alive, alone = 1.0, 0.0  # all tokens so far are the target's, and the drafter's too or not
        for i, token in enumerate(fixed):
            seen, later = (*history, *fixed[:i]), np.prod(drawn[i + 1 :])
            p = self.target(seen)[token]
            both = agreement("match", True, self.target(seen), draft(seen))[token] if i < count else 0.0
            refused = alive * (drawn[i] - both)  # that the drafter has drawn
            probabilities[count, i] += refused * later
            probabilities[len(fixed), i] += (alive + alone) * (1 - p) - refused * later
            alive, alone = alive * both, alive * (p - both) + alone * p
        probabilities[len(fixed), len(fixed)] += alone
        behind = self._accepted((*history, *fixed), draft, max(count - len(fixed), 0))
        probabilities[count, len(fixed) :] += alive * behind[: K + 1 - len(fixed)]
        return probabilities

    def _accepted(self, history, draft: Model, count: int) -> np.ndarray:
        """Distribution of the number of drafts accepted in a round of so many, ``[K + 1]``."""
        coupled, probabilities = self.program.draft_sampling == "coupled", np.zeros(K + 1)
        emitted = round_distribution(self.program.verify, coupled, self.target, draft, history, count)
        for tokens, mass in emitted.items():
            probabilities[len(tokens) - 1] += mass
        return probabilities


def prompt_lookup(history, many: int, lengths=NGRAM) -> tuple[int, ...]:
    """What followed the last occurrence of the longest suffix that occurs earlier; nothing if none of these lengths does."""
    shortest, longest = lengths
    for size in range(longest, shortest - 1, -1):
        for end in range(len(history) - 1, size - 1, -1):
            if history[end - size : end] == history[-size:]:
                text = list(history)
                for i in range(many):
                    text.append(text[end + i])
                return tuple(text[len(history) :])
    return ()


def corpus_lookup(history, many: int) -> tuple[int, ...]:
    """What followed the first occurrence, in the corpus, of the longest suffix that occurs there with a token after it."""
    shortest, longest = NGRAM
    for size in range(min(longest, len(history)), shortest - 1, -1):
        for text in CORPUS:
            for end in range(size, len(text)):
                if text[end - size : end] == tuple(history[-size:]):
                    return text[end : end + many]
    return ()
