"""The GRPO of train_by_grpo.py by a trainer and several engines, actors of Ray of which any may be killed.

Run it with ``python examples/train_by_grpo_on_ray.py checkpoints/``. It needs ``pip install 'jspec[ray]'``. On a cluster,
start it where ``ray.init()`` finds the head, with ``--engines`` and ``--gpus 1``: of each engine, and of the trainer.

Every step divides the prompts among the engines. The trainer learns from their answers, and its new weights lie once in the
object store of Ray, from where all engines of a node read them without a copy of their own. Ray's transports between GPUs
(NCCL and others) know tensors of PyTorch and no arrays of JAX; docs/guides/ray.md says more.

Ray starts a killed actor anew and asks it again. An engine finds the weights in the call, and samples what the killed one
would have sampled: an answer depends on the weights, on the step and on its prompt. A trainer goes on from its last
checkpoint, and so does this program when it is started again. Whatever is killed, rewards and weights are those of a run
that nobody disturbed, and those of train_by_grpo.py.
"""

import argparse
import pathlib
import time
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import ray
from train_by_grpo import PROMPTS, Learner, load, sample

import jspec

# A killed actor is started again however often that is, and the call that it did not answer is made again. No actor keeps
# a CPU from the others: with one each, a machine of two CPUs would wait for a third.
SURVIVES: Any = {"max_restarts": -1, "max_task_retries": -1, "num_cpus": 0}
Weights = tuple[int, dict[str, np.ndarray]]  # how many steps made them, and the arrays by jspec's names


@ray.remote(**SURVIVES)
class Engine:
    """Samples answers with whatever weights a call has."""

    def __init__(self, prompts: int):
        self._llm = load(prompts)
        self._version = None

    def sample(self, weights: Weights, places: list[int]) -> list[jspec.Result]:
        version, arrays = weights
        if version != self._version:
            self._llm.update_weights(arrays, names="jspec", version=version)
            self._version = version
        return sample(self._llm, version, places)


@ray.remote(**SURVIVES)
class Trainer:
    """Learns from answers to its newest weights, and writes a checkpoint after every so many steps and after the last."""

    def __init__(self, folder: pathlib.Path, every: int, steps: int):
        with load(1) as llm:
            self._learner, self._rewards = Learner(llm.target), []
        self._every, self._steps = every, steps
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._checkpoints = ocp.CheckpointManager(folder, options=options)
        if (newest := self._checkpoints.latest_step()) is not None:
            leaves, structure = jax.tree.flatten((self._learner.weights, self._learner.moments))
            kept = {"state": ocp.args.StandardRestore(leaves), "rewards": ocp.args.JsonRestore()}
            found: Any = self._checkpoints.restore(newest, args=ocp.args.Composite(**kept))
            self._learner.weights, self._learner.moments = jax.tree.unflatten(structure, found.state)
            self._rewards = found.rewards["of_steps"]

    @ray.method(num_returns=2)
    def step(self, *shares: list[jspec.Result]) -> tuple[list[float], Weights]:
        """Learn from the answers of all engines; returns the rewards of all steps until now, and the newest weights.

        Answers to other weights teach nothing. They come where this trainer began from a checkpoint, while the one before
        it had got further, or where Ray asks twice.
        """
        answers = [one for share in shares for one in share]
        if {version for one in answers for version, _ in one.weights_versions} == {len(self._rewards)}:
            self._rewards.append(self._learner.learn(answers))
            if len(self._rewards) % self._every == 0 or len(self._rewards) == self._steps:
                self._save()
        return self._rewards, (len(self._rewards), jax.device_get(self._learner.params()))

    def _save(self):
        leaves = jax.tree.leaves((self._learner.weights, self._learner.moments))
        kept = {"state": ocp.args.StandardSave(leaves), "rewards": ocp.args.JsonSave({"of_steps": self._rewards})}
        self._checkpoints.save(len(self._rewards), args=ocp.args.Composite(**kept))


def train(folder: pathlib.Path, steps: int, count: int, every: int, gpus: float) -> list[float]:
    """The mean reward of each step, by so many engines."""
    shares = [share.tolist() for share in np.array_split(np.arange(len(PROMPTS)), count)]
    engines: list[Any] = [Engine.options(num_gpus=gpus).remote(len(share)) for share in shares]
    trainer: Any = Trainer.options(num_gpus=gpus).remote(folder.resolve(), every, steps)
    # What a call returns is the caller's: these weights outlive the trainer's process, in the object store of its node.
    rewards, weights = trainer.step.remote()
    while (number := len(ray.get(rewards))) < steps:
        began = time.perf_counter()
        answers = [engine.sample.remote(weights, share) for engine, share in zip(engines, shares, strict=True)]
        rewards, weights = trainer.step.remote(*answers)
        if len(found := ray.get(rewards)) != number + 1:
            print(f"the trainer was lost in step {number}, and goes on with step {len(found)}", flush=True)
            continue
        bar, took = "#" * round(3 * found[-1]), f"{time.perf_counter() - began:5.1f} s"
        print(f"step {number:3}  reward {found[-1]:6.2f} {bar:<48}  {took}", flush=True)
    return ray.get(rewards)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", type=pathlib.Path, help="the folder where the trainer writes and finds them")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--engines", type=int, default=2, choices=range(1, len(PROMPTS) + 1))
    parser.add_argument("--every", type=int, default=5, help="steps until the next checkpoint")
    parser.add_argument("--gpus", type=float, default=0, help="of each engine, and of the trainer")
    args = parser.parse_args()
    ray.init(runtime_env={"working_dir": str(pathlib.Path(__file__).parent)})  # actors import train_by_grpo, too
    rewards = train(args.checkpoints, args.steps, args.engines, args.every, args.gpus)
    first, last = rewards[0], rewards[-1]
    print(f"the reward {'rose' if last > first else 'did not rise'} from {first:.2f} to {last:.2f}")


if __name__ == "__main__":
    main()
