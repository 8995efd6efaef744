"""What must come out, in float64 and from the definitions: distributions of logits, of a round, of a completion.

Models here are functions from a history (a tuple of tokens) to a distribution, float64 ``[V]``. Nothing of jspec is
used."""

import dataclasses
from collections.abc import Callable

import numpy as np

History = tuple[int, ...]
Model = Callable[[History], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Warp:
    """Settings of a request; 0, 0, 1 and 0 are greedy, no top-k, no top-p and no min-p."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclasses.dataclass(frozen=True)
class Options:
    """What a request does to logits before its temperature does, as ``SamplingParams`` has it; bad words are tokens."""

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: History | None = None
    bad_words: tuple[History, ...] = ()
    grammar: "Grammar | None" = None


@dataclasses.dataclass(frozen=True)
class Grammar:
    """Which tokens may follow which, as a finite automaton that begins in state 0.

    Attributes:
      following: for each state and each token, the next state; -1 if the token may not come.
      jump_forward: for each state, its jump-forward token, or -1.
    """

    following: tuple[tuple[int, ...], ...]
    jump_forward: tuple[int, ...]

    def state(self, completion: History) -> int:
        """The state after a completion, all of whose tokens may come."""
        state = 0
        for token in completion:
            state = self.following[state][token]
        return state

    def jump_forward_after(self, completion: History, most: int) -> History:
        """The jump-forward tokens after a completion."""
        drafts: History = ()
        while len(drafts) < most and (token := self.jump_forward[self.state(completion + drafts)]) >= 0:
            drafts += (token,)
        return drafts


def processed(logits, history: History, prompt_length: int, options: Options) -> np.ndarray:
    """The logits after a history, as a request wants them: allowed tokens, bad words, bias, repetition, the others."""
    x, new = np.array(logits, np.float64), history[prompt_length:]
    for v in range(len(x)):
        if options.allowed_token_ids is not None and v not in options.allowed_token_ids:
            x[v] = -np.inf
        if options.grammar is not None and options.grammar.following[options.grammar.state(new)][v] < 0:
            x[v] = -np.inf
        if any(word[-1] == v and new[len(new) - len(word) + 1 :] == word[:-1] for word in options.bad_words):
            x[v] = -np.inf
        x[v] += dict(options.logit_bias).get(v, 0.0)
        if v in history:
            x[v] *= options.repetition_penalty if x[v] <= 0 else 1 / options.repetition_penalty
        x[v] -= options.frequency_penalty * new.count(v) + options.presence_penalty * (v in new)
    return x


def distribution(logits, warp: Warp) -> np.ndarray:
    """Temperature, then min-p, top-k and top-p, each over what the one before left, ties kept, renormalised."""
    logits = np.asarray(logits, np.float64)
    if warp.temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    p = np.exp((logits - logits.max()) / warp.temperature)
    p = np.where(p >= warp.min_p * p.max(), p, 0.0)
    if warp.top_k:
        p = np.where(p >= np.sort(p)[::-1][min(warp.top_k, len(p)) - 1], p, 0.0)
    if warp.top_p < 1:
        descending = np.sort(p)[::-1]
        enough = np.cumsum(descending) >= warp.top_p * p.sum()
        p = np.where(p >= descending[np.argmax(enough)], p, 0.0)
    return p / p.sum()


def agreement(rule: str, coupled: bool, p, q) -> np.ndarray:
    """Probability that each token is drafted from q and accepted against p, for the rules that judge token by token.

    Its sum is the acceptance: sum min(p, q) for ``rejection``, sum p q for ``match``, and with coupled noise
    sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) (Daliri, Musco and Suresh, 2024). A point mass q makes all of them
    p(draft)."""
    if rule == "rejection":
        return np.minimum(p, q)
    if not coupled:
        return p * q
    both = (p > 0) & (q > 0)
    return np.array([1 / np.maximum(p / p[v], q / q[v]).sum() if both[v] else 0.0 for v in range(len(p))])


def round_distribution(rule: str, coupled: bool, target: Model, draft: Model, history: History, count: int):
    """Probability of everything that a round with ``count`` drafts may emit: a dict from tokens, accepted + 1 of them.

    A round splits mass. Of the mass alive at a prefix, a part goes on with each token and the rest stops there, so that
    together they are the target's distribution. ``block`` (Sun et al., 2024) lets go on as much as was drafted at all:
    min(alive p(v), drafted q(v)); its acceptance is the sum over i of E[w_i] = alive / drafted.
    """
    emitted: dict[History, float] = {}

    def split(drafts: History, alive: float, drafted: float):
        p = target(history + drafts)
        goes_on, q = np.zeros_like(p), np.zeros_like(p)
        if len(drafts) < count:
            q = draft(history + drafts)
            goes_on = np.minimum(alive * p, drafted * q) if rule == "block" else alive * agreement(rule, coupled, p, q)
        for v in range(len(p)):
            stops = alive * p[v] - goes_on[v]
            if stops > 1e-15:
                emitted[(*drafts, v)] = stops
            if goes_on[v] > 0:
                split((*drafts, v), goes_on[v], drafted * q[v])

    split((), 1.0, 1.0)
    return emitted


def completion_distribution(target: Model, prompt: History, length: int, stop_tokens: History = ()) -> np.ndarray:
    """Joint distribution of ``length`` tokens, float64 ``[V + 1] * length``; what follows a stop token is the symbol
    V."""
    V = len(target(prompt))
    joint = np.zeros((V + 1,) * length)

    def grow(tokens: History, mass: float):
        if len(tokens) == length or (tokens and tokens[-1] in stop_tokens):
            joint[tokens + (V,) * (length - len(tokens))] = mass
            return
        p = target(prompt + tokens)
        for v in np.flatnonzero(p):
            grow((*tokens, int(v)), mass * p[v])

    grow((), 1.0)
    return joint
