"""Rounds of draft trees over a tiny target, with all that a test may ask of a tree and of a text.

A text is compared with the target's own seeded samples, from one causal pass. A tree is compared with that of the same text
freshly prefilled, because neither may depend on the rounds in which the text came.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from engines import LLAMA, ragged_prompts
from flax import nnx
from heads import HEADS, LAYER, VARIANTS, compile_fast, random_head, serving

from jspec.config import EngineConfig, ModelConfig, Speculation, TreeShape
from jspec.config.heads import EagleConfig, HeadConfig
from jspec.drafting.methods import drafter_for
from jspec.engine.runner.state import LIVE, DecodeState, RequestArrays, init_state
from jspec.engine.runner.step import DecodeStep
from jspec.engine.runner.step_io import PrefillInputs
from jspec.models import Decoder, causal_logits
from jspec.models.flatten import flatten
from jspec.sampling.distribution import Warp, make_distribution
from jspec.sampling.params import MAX_STOP_TOKENS
from jspec.sampling.streams import RoundNoise
from jspec.sampling.tree import Tree
from jspec.sampling.verify import RULES

S, P = 32, 4  # slots of a row and of a page: a tree crosses pages, and the table ends where the row does
TARGET: ModelConfig = dataclasses.replace(LLAMA, num_layers=2, windows=())
DRAFTERS: dict[str, HeadConfig] = {
    "eagle": EagleConfig(LAYER, fuse_bias=True),
    "eagle3": dataclasses.replace(HEADS["eagle3"], aux_layers=(0, 1, 2)),  # knows 20 tokens of 29
    "dflash": dataclasses.replace(HEADS["dflash"], aux_layers=(0, 1, 2)),
    "dspark": dataclasses.replace(
        HEADS["dspark"], aux_layers=(0, 2)
    ),  # whose drafts know the one before, and 20 tokens
    "dspark-rnn": dataclasses.replace(VARIANTS["dspark-rnn"], aux_layers=(1,)),  # and all those before
}
SHAPE = TreeShape(nodes=8, depth=3, branch=2)
PROMPTS = ragged_prompts((1, 2, 5, 9, 3, 7, 4, 6), seed=3)
WARP = Warp(
    jnp.array([1.0, 1.0, 0.7, 1.3, 0.0, 0.0, 2.0, 3.0]),
    jnp.array([0, 0, 9, 0, 0, 0, 0, 0]),
    jnp.array([1.0, 1.0, 1.0, 0.9, 1.0, 1.0, 1.0, 1.0]),
    jnp.array([0.0, 0.05, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
)
CONFIG = EngineConfig(max_batch=len(PROMPTS), max_len=S, page_size=P)


@functools.cache
def target(window: int) -> Decoder:
    """Its second layer has a window."""
    return Decoder(dataclasses.replace(TARGET, windows=(None, window)), rngs=nnx.Rngs(4))


class Round(NamedTuple):
    """What a round began with, and its tree: arrays on the host, one entry for each row."""

    text: np.ndarray
    length: np.ndarray
    live: np.ndarray
    tree: Tree
    accepted: np.ndarray


class TreeBench:
    """A row for each of ``PROMPTS``, played until each has all of its S tokens.

    Args:
      head: of ``DRAFTERS``.
      shape: of the trees.
      window: of a layer of the target; None takes the shortest that may be.
      like: a bench with the same shape, whose compiled programs serve where none is traced anew.
      anew: the programs that are: ``draft`` or ``verify``, into which a test has put a fault.
    """

    def __init__(
        self,
        head: str = "eagle",
        shape: TreeShape = SHAPE,
        window: int | None = None,
        like: "TreeBench | None" = None,
        anew: str = "",
    ):
        config, self.shape, self.window = DRAFTERS[head], shape, shape.depth + 1 if window is None else window
        self.leaves, merge = flatten(serving(config, random_head(config)))

        model, make = target(self.window), drafter_for(config, TARGET, Speculation(tree=shape))

        def step(leaves, chain=False) -> DecodeStep:
            trees: Any = make(model, merge(leaves))
            return DecodeStep(model, trees.chain if chain else trees, RULES["match"], shape.nodes)

        programs: dict[str, Any] = {
            "prefill": lambda leaves, *args: prefilled(step(leaves), *args),
            "draft": lambda leaves, state: step(leaves).draft(state),
            "chain": lambda leaves, state: step(leaves, chain=True).draft(state)[1],
            "verify": lambda leaves, state, tree: step(leaves).verify(state, tree),
        }
        same = {} if like is None else like.programs
        self.programs = {
            name: compile_fast(function) if name == anew or name not in same else same[name]
            for name, function in programs.items()
        }

    def run(self, name: str, *args) -> Any:
        return self.programs[name](self.leaves, *args)

    def fresh(self, text, length, limit=S, max_drafts=99) -> DecodeState:
        """The state of rows whose prompts are these texts, int32 ``[B, S]``, of so many tokens."""
        B = len(PROMPTS)
        limits, most = (jnp.broadcast_to(jnp.asarray(x, jnp.int32), (B,)) for x in (limit, max_drafts))
        return self.run("prefill", jnp.asarray(text, jnp.int32), jnp.asarray(length, jnp.int32), limits, most)

    def play(self, max_drafts=99) -> tuple[list[Round], np.ndarray]:
        """Every round, and the texts ``[B, S]``."""
        text = np.array([[*prompt, *[0] * (S - len(prompt))] for prompt in PROMPTS], np.int32)
        state, rounds = self.fresh(text, list(map(len, PROMPTS)), max_drafts=max_drafts), []
        while np.asarray(state.live).any():
            before = [np.asarray(x) for x in (state.tokens, state.request.length, state.live)]
            drafted, tree = self.run("draft", state)
            state, log = self.run("verify", drafted, tree)
            rounds.append(Round(*before, jax.device_get(tree), np.asarray(log.accepted)))
        assert (np.asarray(state.request.length) == S).all()
        return rounds, np.asarray(state.tokens)


def prefilled(step: DecodeStep, text, length, limit, max_drafts) -> DecodeState:
    """The batch after its prompts; row b has the key (5, b), and its pages lie anywhere in the pool."""
    state, B = init_state(CONFIG, step.target, step.drafter, jnp.float32), len(text)
    row, pages = jnp.arange(B, dtype=jnp.int32), np.random.default_rng(1).permutation(np.arange(1, CONFIG.pool_pages))
    request = RequestArrays(
        length=length,
        limit=limit,
        min_length=jnp.zeros(B, jnp.int32),
        stop_tokens=jnp.full((B, MAX_STOP_TOKENS), -1, jnp.int32),
        key_data=keys(),
        table=jnp.asarray(pages[: B * S // P].reshape(B, -1), jnp.int32),
        max_drafts=max_drafts,
        warp=WARP,
    )
    live = jnp.full(B, LIVE, jnp.int32)
    state = dataclasses.replace(state, tokens=text, outcome=live, request=request, previous=length - 1)
    following = jnp.pad(text, ((0, 0), (0, 1)))
    return step.prefill(state, PrefillInputs(row, following, jnp.zeros_like(row), length - 1, request.table))


def keys() -> jax.Array:
    return jnp.array([[5, row] for row in range(len(PROMPTS))], jnp.uint32)


@functools.partial(jax.jit, static_argnames="window")
def drawn_by_target(leaves, text, window: int):
    """The tokens that the target draws behind each token of a text, int32 ``[B, S - 1]``."""
    positions = jnp.broadcast_to(jnp.arange(1, S, dtype=jnp.int32), (len(text), S - 1))
    noise = RoundNoise(keys(), jnp.zeros(len(text), jnp.int32)).sample_keys(positions)
    logits = causal_logits(flatten(target(window)).merge(leaves), text)
    return make_distribution(logits[:, :-1], WARP, noise)[1]


def assert_texts(bench: TreeBench, text):
    """Every token behind the prompts, ``[B, S]``, is the target's own."""
    drawn = np.asarray(drawn_by_target(flatten(target(bench.window)).leaves, text, bench.window))
    for row, prompt in enumerate(PROMPTS):
        own = drawn[row, len(prompt) - 1 :].tolist()
        assert text[row, len(prompt) :].tolist() == own, "the text is not the target's own"


def paths_of(tree: Tree, row: int) -> list[tuple[int, ...]]:
    """The tokens of the path that ends at each draft of a row: parents come first, and differ from their siblings."""
    paths: list[tuple[int, ...]] = [()]
    for i in range(int(tree.count[row])):
        parent = int(tree.parents[row, i])
        assert parent <= i, "a draft comes before its parent"
        paths.append((*paths[parent], int(tree.tokens[row, i])))
        assert tree.depths[row, i] == len(paths[-1])
    assert len(set(paths)) == len(paths), "two siblings are the same token"
    return paths[1:]


def assert_trees(bench: TreeBench, rounds: list[Round], max_drafts: int = 99):
    """Every tree has as many drafts as it may, follows from the text alone, and has the drafts of the chain in it."""
    K = bench.shape.depth
    for text, length, live, tree, _ in rounds:
        state = bench.fresh(text, np.maximum(length, 1), max_drafts=max_drafts)
        again, chain = bench.run("draft", state)[1], bench.run("chain", state)
        for row in np.flatnonzero(live):
            paths, count = paths_of(tree, row), int(tree.count[row])
            room = min(K, S - 1 - length[row], max_drafts)
            most = min(bench.shape.nodes - 1, S - length[row], max_drafts) if length[row] > 1 and room > 0 else 0
            assert count <= most, "drafts past the slots of the row, or more than its request wants"
            assert count == most or count >= room
            assert all(len(path) <= room for path in paths)
            assert sorted(paths) == sorted(paths_of(again, row)), "the tree depends on the rounds before it"
            drafts = tuple(np.asarray(chain.tokens)[row, : int(chain.count[row])].tolist())
            for depth in range(1, len(drafts) + 1):
                siblings = {path for path in paths if path[:-1] == drafts[: depth - 1]}
                assert drafts[:depth] in siblings or not siblings, "the chain's draft is not the likeliest child"
