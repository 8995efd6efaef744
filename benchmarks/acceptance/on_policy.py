"""How many drafts are accepted while the target changes under its draft head, with a head that is trained on the rollouts
and with one that grows old.

    python -m benchmarks.acceptance.on_policy                    # both ways to change the target; an hour on two cores
    python -m benchmarks.acceptance.on_policy --change grpo --every 0 4 --steps 20

The shipped target and its EAGLE-3 head, K = 3, on a CPU. Each step samples 32 answers of 24 tokens, moves the target's
weights, writes them into the engine, and with every n-th step (``--every``, 0 is never) trains the head on the answers:

* ``grpo``: as ``examples/train_by_grpo.py`` does. The target learns to write short lines, and its texts get simple.
* ``texts``: the target learns to write this repository's documents, by the cross-entropy of their next tokens. The answers
  continue excerpts of them, and stay as varied as before.

A line has accepted / proposed drafts before the first update and over the last tenth of the steps; the share of the time of
all steps that the head's training takes; and the seconds of sampling and of a whole step. Those of the first tenth of the
steps, in which programs are compiled, do not count."""

import argparse
import runpy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jspec
from jspec.models import causal_logits, flat_params
from jspec.outputs import total_stats
from jspec.train import OnPolicyTrainer

ROOT = Path(__file__).parents[2]
GRPO = runpy.run_path(str(ROOT / "examples" / "train_by_grpo.py"))
HEAD, MODELS, Step = GRPO["HEAD"], GRPO["MODELS"], GRPO["Step"]
ANSWERS, TOKENS, PROMPT, WINDOW = 32, 24, 8, 64


def learn_texts(steps: int, train_head: int, *, head: Any = HEAD, learning_rate: float = 3e-4) -> Iterator[Any]:
    """Steps of an example's ``train``, whose target learns to write the documents of this repository."""
    llm = jspec.load(
        MODELS / "target", MODELS / "eagle3", num_draft_tokens=3, max_batch=ANSWERS, max_len=64, dtype="float32"
    )
    trainer = OnPolicyTrainer(llm, **head) if train_head else None
    graph, weights = nnx.split(llm.target)
    weights = jax.tree.map(jnp.copy, weights)
    optimizer = optax.adam(learning_rate)
    state, rng = optimizer.init(weights), np.random.default_rng(0)
    encode: Any = llm.tokenizer
    texts = [
        line for page in sorted((ROOT / "docs").rglob("*.md")) for line in page.read_text().splitlines(keepends=True)
    ]
    corpus = np.concatenate([encode.encode(text, add_special_tokens=False) for text in texts]).astype(np.int32)

    @jax.jit
    def step(weights, state, windows):
        def loss(weights):
            logits = causal_logits(nnx.merge(graph, weights), windows[:, :-1]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

        updates, state = optimizer.update(jax.grad(loss)(weights), state)
        return optax.apply_updates(weights, updates), state

    def excerpts(length: int) -> np.ndarray:
        return corpus[rng.integers(0, len(corpus) - length, ANSWERS)[:, None] + np.arange(length)]

    for number in range(steps):
        began = time.perf_counter()
        answers: Any = llm.generate(excerpts(PROMPT).tolist(), seed=number, max_tokens=TOKENS, ignore_eos=True)
        sampling = time.perf_counter() - began
        weights, state = jax.block_until_ready(step(weights, state, excerpts(WINDOW + 1)))
        done = llm.update_weights(flat_params(nnx.merge(graph, weights)), names="jspec")
        written = time.perf_counter()
        if trainer is not None and number % train_head == 0:
            trainer.step(answers)
        now, stats = time.perf_counter(), total_stats(one.stats for one in answers)
        yield Step(0.0, stats, now - began, sampling, done.seconds, now - written)


CHANGES = {"grpo": GRPO["train"], "texts": learn_texts}


def accepted(steps: list[Any]) -> float:
    """Accepted over proposed drafts."""
    return total_stats(step.stats for step in steps).acceptance_rate


def line(steps: list[Any], before: float) -> str:
    """What became of these steps, of which the drafts of the first tenth were accepted so often without any update."""
    few = len(steps) // 10
    after, timed = accepted(steps[-few:]), steps[few:]
    lowest = min(accepted(steps[i : i + few]) for i in range(0, len(steps), few))
    seconds, sampling, head = (sum(getattr(step, name) for step in timed) for name in ("seconds", "sampling", "head"))
    return (
        f"accepted {before:.3f} before, {after:.3f} after {len(steps)} updates ({after / before:.0%}), lowest tenth "
        f"{lowest:.3f} ({lowest / before:.0%}); head {head / seconds:.1%} of the time; a step {seconds / len(timed):.2f} s, "
        f"{sampling / len(timed):.2f} s of them sampling"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--change", choices=CHANGES, nargs="+", default=list(CHANGES))
    parser.add_argument("--every", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=HEAD["learning_rate"], help="of the head")
    parser.add_argument("--windows", type=int, default=8, help="of 32 tokens each, in a step of the head")
    args = parser.parse_args()
    head = {"learning_rate": args.learning_rate, "tokens_per_step": 32 * args.windows, "length": 32}
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}; {head}", flush=True)
    for change in args.change:
        before = accepted(list(CHANGES[change](args.steps // 10, 0, learning_rate=0.0)))
        for every in args.every:
            steps = list(CHANGES[change](args.steps, every, head=head))
            print(f"{change:5} every {every}: {line(steps, before)}", flush=True)


if __name__ == "__main__":
    main()
