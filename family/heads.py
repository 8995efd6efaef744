"""Train five draft heads for the family's target, each written in the public layout of its method.

    python -m family.heads --data DIR --out DIR              # DIR of family.corpus; minutes on one H200
    python -m family.heads --data DIR --out DIR --bench      # 30 steps of each head, and how long a run would take

writes ``eagle/``, ``eagle3/``, ``parallel/``, ``mlp/`` and ``medusa/``, ready to lie beside ``target/``; their logs,
plots, figures and states are in ``runs/``. A run that was stopped goes on with the same command."""

import argparse
import dataclasses
import shutil
import sys
from pathlib import Path

import jax.numpy as jnp

from family.train import TOKENS, time_steps
from jspec.checkpoints.folder import Folder
from jspec.checkpoints.hf_config import read_config
from jspec.demo import FAMILY
from jspec.models.split import split
from jspec.train.loop import Plan
from jspec.train.methods import Sizes, make_objective
from jspec.train.objectives import loss_of
from jspec.train.report import FIGURES
from jspec.train.run import HEAD, SETTINGS, TrainingRun, prepare, start, train

TARGET = FAMILY / "target"
MOST_BYTES = 18e6  # of all heads in bf16


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How one head is made."""

    plan: Plan
    sizes: Sizes


def plan(steps: int, peak_rate: float) -> Plan:
    return Plan(steps, peak_rate, weight_decay=0.1, evaluate_every=500)


# MLPs narrower than the target's, so that Medusa heads, which other engines read only with output heads of their own,
# find room within MOST_BYTES.
RECIPES = {
    "eagle": Recipe(plan(6000, 2e-3), Sizes(intermediate_size=768)),
    "eagle3": Recipe(plan(4000, 2e-3), Sizes(intermediate_size=768, draft_vocab_size=1024)),
    "parallel": Recipe(plan(4000, 2e-3), Sizes(intermediate_size=768, draft_vocab_size=1024, layers=2)),
    "mlp": Recipe(plan(6000, 2e-3), Sizes(num_draft_tokens=4, inner_size=192, tie=True)),
    "medusa": Recipe(plan(4000, 1e-3), Sizes(num_draft_tokens=3)),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that family.corpus wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the heads and their runs")
    parser.add_argument("--target", type=Path, default=TARGET, help="folder of the target; default: the shipped one")
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES), help="some of the heads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bench", action="store_true", help="time 30 steps of each head and write nothing")
    return parser.parse_args()


def run_of(name: str, args: argparse.Namespace) -> TrainingRun:
    """The training run of a head; it goes on if it has begun."""
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
        resume=(out / SETTINGS).is_file(),
        target_name="../target",
    )


def bench(run: TrainingRun) -> float:
    """Print the time of a step; returns the projected seconds of the run without its evaluations."""
    material = prepare(run)
    leaves, merge = split(material.target)
    params, constants, _ = start(run, material)
    loss = loss_of(material.objective, merge, run.dtype)
    return time_steps(run.method, run.plan, loss, params, (leaves, constants), jnp.asarray(material.corpus.train))


def size_table(args: argparse.Namespace) -> str:
    """Parameters and bytes of the heads, a line each, and their sum against ``MOST_BYTES``."""
    target = read_config(Folder(args.target))
    sizes = {name: make_objective(name, target, RECIPES[name].sizes).config.num_parameters for name in args.only}
    lines = [f"{name:10s} {count:10,d} parameters {2e-6 * count:6.2f} MB in bf16" for name, count in sizes.items()]
    total = sum(sizes.values())
    return "\n".join(
        [*lines, f"{'together':10s} {total:10,d} parameters {2e-6 * total:6.2f} of {MOST_BYTES / 1e6:.0f} MB"]
    )


def main() -> int:
    args = parse_arguments()
    print(size_table(args), flush=True)
    if args.bench:
        seconds = sum(bench(run_of(name, args)) for name in args.only)
        print(f"projected: {seconds:.0f} s, evaluations and compilation for serving not counted")
        return 0
    for name in args.only:
        run = run_of(name, args)
        print(f"training {name}", flush=True)
        figures = train(run)
        shutil.copytree(run.out / HEAD, args.out / name, dirs_exist_ok=True)
        shutil.copyfile(run.out / FIGURES, args.out / name / FIGURES)
        print(f"{name}: acceptance lengths {figures['acceptance_length']}, {figures['seconds']:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
