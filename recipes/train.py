"""Train the target, distil the draft model from it, and write both as Hugging Face checkpoints.

    python -m recipes.train --data DIR --out DIR            # --data is the folder of recipes.corpus; minutes on one H200
    python -m recipes.train --data DIR --out DIR --bench    # time 30 steps of each model, and project the full training

writes ``target/``, ``draft/``, ``losses.csv`` and ``figures.json``.
"""

import argparse
import csv
import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jspec.config import ModelConfig
from jspec.models import Decoder, flat_params
from jspec.train.loop import Params, TrainingPlan, TrainingProgress, fit, make_evaluator, make_step
from recipes.configs import DRAFT, TARGET
from recipes.export import save_checkpoint
from recipes.objectives import agreement, distillation, language_modelling

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
BENCH_STEPS = 30
TOKENS = "tokens.npz"


class Corpus(NamedTuple):
    """Token ids, uint16 ``[N]``: the training part lies on the device, the held-out part on the host."""

    train: jax.Array
    held_out: np.ndarray


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that recipes.corpus wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoints, the log and the figures")
    parser.add_argument("--target-steps", type=int, default=3000)
    parser.add_argument("--draft-steps", type=int, default=12000, help="0 trains the target alone")
    parser.add_argument("--target-rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--draft-rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--target-decay", type=float, default=0.5, help="decoupled weight decay; large for many epochs")
    parser.add_argument("--draft-decay", type=float, default=0.1, help="decoupled weight decay")
    parser.add_argument("--tokens-per-step", type=int, default=32 * 1024)
    parser.add_argument("--length", type=int, default=TARGET.max_position, help="tokens of a window")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bench", action="store_true", help="time 30 steps of each model and write nothing")
    return parser.parse_args()


def plans(args: argparse.Namespace) -> tuple[TrainingPlan, TrainingPlan]:
    """The training plans of the target and of the draft model."""
    shared = {"tokens_per_step": args.tokens_per_step, "length": args.length}
    return (
        TrainingPlan(steps=args.target_steps, peak_rate=args.target_rate, weight_decay=args.target_decay, **shared),
        TrainingPlan(steps=args.draft_steps, peak_rate=args.draft_rate, weight_decay=args.draft_decay, **shared),
    )


def initial_params(config: ModelConfig, key: jax.Array) -> dict[str, jax.Array]:
    """Random fp32 weights to start training from, under dotted names.

    The output projections of attention and MLP are scaled by 1 / sqrt(2L), because the residual stream is a sum of 2L of
    their outputs (GPT-2; Radford et al., 2019).
    """
    model = Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(key))
    residual_outputs = (".out.weight", ".down.weight")
    scale = (2 * config.num_layers) ** -0.5
    return {name: w * scale if name.endswith(residual_outputs) else w for name, w in flat_params(model).items()}


def train(
    name: str,
    config: ModelConfig,
    plan: TrainingPlan,
    loss,
    corpus: Corpus,
    key: jax.Array,
    log: Path,
    target_params=None,
) -> Params:
    """Train one model and return its weights; every evaluation is printed and appended to the file ``log``.

    Args:
      name: ``target`` or ``draft``, for the log.
      config: the model.
      plan: number of steps, batch size and optimizer.
      loss: a loss of ``recipes.objectives``.
      corpus: the training and the held-out tokens.
      key: seeds the initial weights and the windows.
      log: a CSV file.
      target_params: the target's weights, which the loss of a draft model needs.
    """

    def report(progress: TrainingProgress, params):
        del params
        fields = dataclasses.asdict(progress)
        print(name, " ".join(f"{field} {value:.4g}" for field, value in fields.items()), flush=True)
        with log.open("a", newline="") as file:
            csv.writer(file).writerow([name, *fields.values()])

    evaluate = make_evaluator(loss, corpus.held_out, plan.batch_shape)
    weight_key, window_key = jax.random.split(key)
    params = initial_params(config, weight_key)
    return fit(plan, loss, evaluate, params, target_params, corpus.train, window_key, report)


def save(folder: Path, config: ModelConfig, params, data: Path) -> None:
    """Write a model as a checkpoint into ``folder``, with the tokenizer from the corpus folder ``data``."""
    save_checkpoint(folder, config, params)
    for name in TOKENIZER_FILES:
        shutil.copy(data / name, folder / name)


def nats_per_token(config: ModelConfig, params, plan: TrainingPlan, corpus: Corpus) -> float:
    """The mean cross-entropy of the next token on the held-out files, in nats per token."""
    return make_evaluator(language_modelling(config), corpus.held_out, plan.batch_shape)(params, None)


def time_steps(name: str, plan: TrainingPlan, loss, params, frozen, tokens: jax.Array) -> float:
    """Time some steps and print the result; returns the projected seconds of all of ``plan``, compilation included."""
    optimizer = plan.optimizer()
    step = make_step(loss, optimizer)
    opt_state, keys = optimizer.init(params), (jax.random.key(1), jax.random.key(2))
    started = time.perf_counter()
    params, opt_state, value = step(params, opt_state, frozen, tokens, keys, batch_shape=plan.batch_shape)
    value.block_until_ready()
    first, started = time.perf_counter() - started, time.perf_counter()
    for _ in range(BENCH_STEPS):
        params, opt_state, value = step(params, opt_state, frozen, tokens, keys, batch_shape=plan.batch_shape)
    value.block_until_ready()
    seconds = (time.perf_counter() - started) / BENCH_STEPS
    total = first + plan.steps * seconds
    print(
        f"{name}: first step {first:.1f} s, then {seconds * 1e3:.2f} ms, "
        f"{plan.tokens_per_step / seconds:,.0f} tokens/s; {plan.steps} steps: {total:.0f} s",
        flush=True,
    )
    return total


def main() -> None:
    args = parse_arguments()
    stored = np.load(args.data / TOKENS)
    corpus = Corpus(jnp.asarray(stored["train"]), stored["held_out"])
    target_plan, draft_plan = plans(args)
    language, distil = language_modelling(TARGET), distillation(TARGET, DRAFT)
    target_key, draft_key = jax.random.split(jax.random.key(args.seed))
    if args.bench:
        target, draft = initial_params(TARGET, target_key), initial_params(DRAFT, draft_key)
        seconds = time_steps("draft", draft_plan, distil, draft, target, corpus.train)
        # The target comes second: its steps donate its params, which the draft model's loss needs.
        seconds += time_steps("target", target_plan, language, target, None, corpus.train)
        print(f"projected: {seconds:.0f} s and evaluations")
        return

    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "losses.csv"
    log.write_text("model,step,seconds,train_loss,held_out_loss\n")
    started = time.perf_counter()
    target = train("target", TARGET, target_plan, language, corpus, target_key, log)
    save(args.out / "target", TARGET, target, args.data)
    figures = {
        "corpus": json.loads((args.data / "corpus.json").read_text()),
        "run": {"seed": args.seed, "jax": jax.__version__, "device": jax.devices()[0].device_kind},
        "target": {
            "parameters": TARGET.num_parameters,
            "plan": dataclasses.asdict(target_plan),
            "held_out_nats_per_token": nats_per_token(TARGET, target, target_plan, corpus),
        },
    }
    if args.draft_steps:
        draft = train("draft", DRAFT, draft_plan, distil, corpus, draft_key, log, target)
        save(args.out / "draft", DRAFT, draft, args.data)
        measured = make_evaluator(agreement(TARGET, DRAFT), corpus.held_out, draft_plan.batch_shape)(draft, target)
        figures["draft"] = {
            "parameters": DRAFT.num_parameters,
            "plan": dataclasses.asdict(draft_plan),
            "held_out_nats_per_token": nats_per_token(DRAFT, draft, draft_plan, corpus),
            "agreement": measured._asdict(),
        }
    figures["run"]["seconds"] = time.perf_counter() - started
    (args.out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
