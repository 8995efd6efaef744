"""Train five draft heads for the family's target, and write each in the public layout of its method.

    python -m recipes.heads --data DIR --out DIR              # --data is the folder of recipes.corpus; minutes on one H200
    python -m recipes.heads --data DIR --out DIR --bench      # time 30 steps of each head, and project the full training

writes ``eagle/``, ``eagle3/``, ``parallel/``, ``mlp/`` and ``dspark/``, to be placed beside ``target/``. Their logs,
plots, figures and training states are in ``runs/``. The same command resumes a training that was stopped.
"""

import argparse
import dataclasses
import shutil
import sys
from pathlib import Path

import jax.numpy as jnp

from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.huggingface.config import read_config
from jspec.commands.demo import FAMILY
from jspec.models.flatten import flatten
from jspec.train.loop import TrainingPlan
from jspec.train.methods import Sizes, make_objective
from jspec.train.objectives import loss_of
from jspec.train.report import FIGURES_FILE
from jspec.train.run import HEAD_FOLDER, SETTINGS_FILE, TrainingRun, initialise, prepare, train
from recipes.train import TOKENS, time_steps

TARGET = FAMILY / "target"
MAX_BYTES = 18e6  # for the bf16 weights of all five draft heads together


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How one draft head is trained: the training plan, and the head's dimensions."""

    plan: TrainingPlan
    sizes: Sizes


def plan(steps: int, peak_rate: float, evaluate_every: int = 500) -> TrainingPlan:
    """A plan with the settings that all recipes share."""
    return TrainingPlan(steps, peak_rate, weight_decay=0.1, evaluate_every=evaluate_every)


# To leave room for all of them within MAX_BYTES, the MLPs of the draft heads are narrower than the target's.
RECIPES = {
    "eagle": Recipe(plan(6000, 2e-3), Sizes(intermediate_size=768)),
    "eagle3": Recipe(plan(4000, 2e-3), Sizes(intermediate_size=768, draft_vocab_size=1024)),
    "parallel": Recipe(plan(4000, 2e-3), Sizes(intermediate_size=768, draft_vocab_size=1024, layers=2)),
    "mlp": Recipe(plan(6000, 2e-3), Sizes(num_draft_tokens=4, inner_size=192, tie=True)),
    "dspark": Recipe(
        plan(4000, 2e-3, evaluate_every=2000),
        Sizes(layers=3, intermediate_size=384, aux_layers=(1, 3, 5), markov_rank=32, loss="soft"),
    ),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that recipes.corpus wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the draft heads and their runs")
    parser.add_argument("--target", type=Path, default=TARGET, help="checkpoint folder; default: the shipped target")
    parser.add_argument(
        "--only", nargs="+", choices=RECIPES, default=list(RECIPES), help="train these draft heads only"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bench", action="store_true", help="time 30 steps of each draft head and write nothing")
    return parser.parse_args()


def make_run(name: str, args: argparse.Namespace) -> TrainingRun:
    """The training run of one draft head, which resumes if its folder already holds a run."""
    out, recipe = args.out / "runs" / name, RECIPES[name]
    return TrainingRun(
        method=name,
        target=args.target,
        data=args.data / TOKENS,
        out=out,
        plan=recipe.plan,
        sizes=recipe.sizes,
        prompts=32,
        seed=args.seed,
        resume=(out / SETTINGS_FILE).is_file(),
        target_name="../target",
    )


def bench(run: TrainingRun) -> float:
    """Time some steps and print the result; returns the projected seconds of the whole run, evaluations excluded."""
    inputs = prepare(run)
    leaves, merge = flatten(inputs.target)
    params, constants, _ = initialise(run, inputs)
    loss = loss_of(inputs.objective, merge, run.dtype)
    return time_steps(run.method, run.plan, loss, params, (leaves, constants), jnp.asarray(inputs.corpus.train))


def size_table(args: argparse.Namespace) -> str:
    """A table with a line per draft head, its parameters and its size in bf16, and a line that compares their sum with
    ``MAX_BYTES``."""
    target = read_config(Folder(args.target))
    sizes = {name: make_objective(name, target, RECIPES[name].sizes).config.num_parameters for name in args.only}
    lines = [f"{name:10s} {count:10,d} parameters {2e-6 * count:6.2f} MB in bf16" for name, count in sizes.items()]
    total = sum(sizes.values())
    return "\n".join(
        [*lines, f"{'together':10s} {total:10,d} parameters {2e-6 * total:6.2f} of {MAX_BYTES / 1e6:.0f} MB"]
    )


def main() -> int:
    args = parse_arguments()
    print(size_table(args), flush=True)
    if args.bench:
        seconds = sum(bench(make_run(name, args)) for name in args.only)
        print(f"projected: {seconds:.0f} s, evaluations and compilation for serving not counted")
        return 0
    for name in args.only:
        run = make_run(name, args)
        print(f"training {name}", flush=True)
        figures = train(run)
        shutil.copytree(run.out / HEAD_FOLDER, args.out / name, dirs_exist_ok=True)
        shutil.copyfile(run.out / FIGURES_FILE, args.out / name / FIGURES_FILE)
        print(f"{name}: acceptance lengths {figures['acceptance_length']}, {figures['seconds']:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
