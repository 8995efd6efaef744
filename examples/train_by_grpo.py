"""Train the shipped target by GRPO on one machine: jspec writes the answers, and its target gets new weights in place.

    python examples/train_by_grpo.py                # two minutes on a CPU: prints the reward of each step
    python examples/train_by_grpo.py --steps 40 --train-head 1

Every step samples several answers to each prompt, gives each of them a reward, and moves the weights towards the answers
that got more than the others of their prompt (Shao et al., 2024). The log-probabilities of the law that tokens were drawn
from come with the answers, so that nothing has to be computed twice. A draft head drafts meanwhile; however old it grows,
the answers are exact samples of the newest weights. With --train-head N it learns from the answers of every N-th step, so
that it stays as fast. The reward is the number of lines in an answer that are not empty."""

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jspec
from jspec.models import causal_logits, flat_params
from jspec.outputs import total_stats
from jspec.train import OnPolicyTrainer

MODELS = Path(jspec.__file__).parent / "demo_models"
PROMPTS = "import os\n", "class Queue:\n", "def main(", "for name in names:\n"
SAMPLES, TOKENS, CLIP = 8, 24, 0.2
HEAD = {"learning_rate": 1e-3, "tokens_per_step": 256, "length": 32}  # of the trainer of the draft head


class Step(NamedTuple):
    """A step: the mean reward, what became of the drafts, and seconds: of all, of sampling, of new weights, of the head."""

    reward: float
    stats: jspec.Stats
    seconds: float
    sampling: float
    update: float
    head: float


def log_probabilities(model: Any, tokens: jax.Array) -> jax.Array:
    """Of each token behind the first, float32 ``[B, n - 1]``."""
    logits = causal_logits(model, tokens).astype(jnp.float32)
    return jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)[..., 0]


class Learner:
    """Weights of a target that GRPO moves, in copies of its own: the engine's are written over.

    Attributes:
      weights: the target's.
      moments: the optimizer's state.
    """

    def __init__(self, target: Any, learning_rate: float = 3e-4):
        self._graph, weights = nnx.split(target)
        self.weights = jax.tree.map(jnp.copy, weights)
        optimizer = optax.adam(learning_rate)
        self.moments = optimizer.init(self.weights)

        def loss(weights, tokens, old, advantages, is_new):
            ratio = jnp.exp(log_probabilities(nnx.merge(self._graph, weights), tokens) - old)
            gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
            return -(gain * is_new).sum() / is_new.sum()

        @jax.jit
        def update(weights, moments, *batch):
            updates, moments = optimizer.update(jax.grad(loss)(weights, *batch), moments)
            return optax.apply_updates(weights, updates), moments

        self._update = update

    def learn(self, answers: list[jspec.Result]) -> float:
        """Move the weights towards the better answers of each prompt; returns the mean reward."""
        earned = np.array([lines(one.text) for one in answers], np.float32).reshape(-1, SAMPLES)
        advantages = (earned - earned.mean(1, keepdims=True)) / (earned.std(1, keepdims=True) + 1e-4)
        batch = batch_of(answers, advantages.reshape(-1))
        self.weights, self.moments = jax.block_until_ready(self._update(self.weights, self.moments, *batch))
        return float(earned.mean())

    def params(self) -> dict[str, jax.Array]:
        """The weights by jspec's names."""
        return flat_params(nnx.merge(self._graph, self.weights))


def load(prompts: int) -> jspec.LLM:
    """The target and its draft head, to sample answers to so many prompts at once."""
    sizes: dict[str, Any] = {"max_batch": prompts * SAMPLES, "max_len": 64, "dtype": "float32"}
    return jspec.load(MODELS / "target", MODELS / "eagle3", num_draft_tokens=3, **sizes)


def sample(llm: jspec.LLM, seed: int, places: Sequence[int]) -> list[jspec.Result]:
    """``SAMPLES`` answers to each of the prompts at these places, whichever others are asked beside it."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), np.array(places))
    params = jspec.SamplingParams(n=SAMPLES, max_tokens=TOKENS, logprobs=0, ignore_eos=True)
    groups: Any = llm.generate([PROMPTS[place] for place in places], params, key=keys)
    return [one for group in groups for one in group]


def train(
    steps: int, train_head: int = 0, *, head: Any = HEAD, learning_rate: float = 3e-4, seed: int = 0
) -> Iterator[Step]:
    """Make steps, and train the draft head with every ``train_head``-th of them; with none if that is 0."""
    llm = load(len(PROMPTS))
    learner, trainer = Learner(llm.target, learning_rate), OnPolicyTrainer(llm, **head) if train_head else None
    for number in range(steps):
        began = time.perf_counter()
        answers = sample(llm, seed + number, range(len(PROMPTS)))
        sampling = time.perf_counter() - began
        reward = learner.learn(answers)
        done = llm.update_weights(learner.params(), names="jspec")
        written = time.perf_counter()
        if trainer is not None and number % train_head == 0:
            trainer.step(answers)
        now, stats = time.perf_counter(), total_stats(one.stats for one in answers)
        yield Step(reward, stats, now - began, sampling, done.seconds, now - written)


def lines(text: str | None) -> int:
    """The reward of an answer."""
    return sum(bool(line.strip()) for line in (text or "").split("\n"))


def batch_of(answers: list[Any], advantages: np.ndarray) -> tuple[jax.Array, ...]:
    """Tokens int32 ``[B, n]``, and for each behind the first the sampler's log-probability, the advantage, and whether it is
    of an answer, ``[B, n - 1]``."""
    longest = max(len(one.prompt_token_ids) for one in answers) + TOKENS
    tokens = np.zeros((len(answers), longest), np.int32)
    old, is_new = np.zeros((2, len(answers), longest - 1), np.float32)
    for row, one in enumerate(answers):
        first, text = len(one.prompt_token_ids), [*one.prompt_token_ids, *one.token_ids]
        tokens[row, : len(text)] = text
        old[row, first - 1 : len(text) - 1] = one.token_logprobs
        is_new[row, first - 1 : len(text) - 1] = 1
    return tuple(map(jnp.asarray, (tokens, old, np.broadcast_to(advantages[:, None], old.shape), is_new)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--train-head", type=int, default=0, metavar="N", help="train the draft head with every N-th step"
    )
    args = parser.parse_args()
    rewards = []
    for number, step in enumerate(train(args.steps, args.train_head)):
        rewards.append(step.reward)
        took = f"{step.seconds:5.1f} s, update {1e3 * step.update:.0f} ms, head {1e3 * step.head:.0f} ms"
        accepted = f"accepted {step.stats.mean_acceptance_length:.2f} a round"
        print(
            f"step {number:3}  reward {step.reward:6.2f} {'#' * round(3 * step.reward):<48}  {accepted}  {took}",
            flush=True,
        )
    first, *_, last = rewards
    print(f"the reward {'rose' if last > first else 'did not rise'} from {first:.2f} to {last:.2f}")
