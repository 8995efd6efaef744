"""One training run: a target, data and a plan in; a head in its public layout, a log, a plot and figures out."""

import dataclasses
import importlib.util
import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jspec._arguments import require
from jspec.checkpoints.export import export_draft
from jspec.checkpoints.loading import load_folder
from jspec.models import build
from jspec.models.split import split
from jspec.text import load_tokenizer
from jspec.train.acceptance import TEMPERATURES, ServedAcceptance
from jspec.train.checkpoints import Checkpoints
from jspec.train.data import Corpus, read_corpus
from jspec.train.loop import Plan, TrainingProgress, fit, over_held_out
from jspec.train.methods import Sizes, initial_params, make_objective
from jspec.train.objectives import Objective, loss_of
from jspec.train.report import FIGURES, Log, versions, write_json

HEAD, STATE, SETTINGS = "head", "state", "settings.json"
HELD_OUT_TOKENS = 2**18  # more would make an evaluation slow and its loss hardly more exact


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """What is to be trained.

    Attributes:
      method: ``eagle``, ``eagle3``, ``parallel``, ``mlp`` or ``medusa``.
      target: checkpoint folder of the target.
      data: a file or a folder, see ``read_corpus``.
      out: folder for the head, the log, the figures and the states.
      plan: for how long, and how.
      sizes: of the head.
      prompts: held-out prompts that acceptance is measured on.
      dtype: that target and head compute in; master weights and the optimizer are fp32.
      seed: of weights, windows and noise.
      resume: go on from the newest state in ``out``.
      target_name: what the head calls its target, where its layout does; None is the target's path.
    """

    method: str
    target: pathlib.Path
    data: pathlib.Path
    out: pathlib.Path
    plan: Plan
    sizes: Sizes = dataclasses.field(default_factory=Sizes)
    prompts: int = 16
    dtype: str = "bfloat16"
    seed: int = 0
    resume: bool = False
    target_name: str | None = None


@dataclasses.dataclass(frozen=True)
class Material:
    """What a run is made of, in memory: the target's module in the run's dtype, the corpus, and the objective."""

    target: Any
    corpus: Corpus
    objective: Objective


def prepare(run: TrainingRun) -> Material:
    """Read target and data.

    Raises:
      ValueError: names the argument or the file that cannot be used, and what would be right.
    """
    require(run.prompts >= 1, "prompts", run.prompts, "an integer of at least 1")
    if not run.target.is_dir():
        raise ValueError(f"target={str(run.target)!r}: expected a checkpoint folder")
    config, params = load_folder(run.target, run.dtype)
    objective = make_objective(run.method, config, run.sizes)
    length, longest = run.plan.length, config.max_position
    least = objective.depths + 2
    require(least <= length <= longest, "length", length, f"in {least}..{longest}, the target's positions")
    corpus = read_corpus(run.data, load_tokenizer(run.target), config.vocab_size, config.eos_token_ids, length)
    return Material(build(config, params, run.dtype), corpus, objective)


def train(run: TrainingRun) -> dict:
    """Train a head; returns what figures.json says. The head lies in ``out/head`` afterwards.

    Raises:
      ValueError: names the argument or the file that cannot be used, and what would be right.
      FloatingPointError: it diverged.
    """
    for name in ("matplotlib", "jinja2"):  # the plot, and chat templates
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"training needs {name}, which is not installed: pip install 'jspec[train]'")
    _check_out(run)
    material = prepare(run)
    _keep_settings(run, material)
    store = Checkpoints(run.out / STATE)
    target, objective, plan = material.target, material.objective, run.plan
    params, constants, key = start(run, material)
    leaves, merge = split(target)
    loss, frozen = loss_of(objective, merge, run.dtype), (leaves, constants)
    held_out = over_held_out(loss, *_held_out_windows(material.corpus, plan))
    served = ServedAcceptance(
        target, objective.config, material.corpus.held_out, run.prompts, objective.depths, run.dtype
    )
    log = Log(run.out, TEMPERATURES, after=-1 if store.step is None else store.step)

    def report(progress: TrainingProgress, params):
        tqdm.write(log.add(progress, served({**params, **constants})))

    if store.step is None:
        report(TrainingProgress(0, 0.0, math.nan, held_out(params, frozen)), params)
    best = fit(plan, loss, held_out, params, frozen, jnp.asarray(material.corpus.train), key, report, store)

    return _finish(run, material, {**best, **constants}, held_out(best, frozen), served, log)


def _finish(
    run: TrainingRun, material: Material, params: dict, loss: float, served: ServedAcceptance, log: Log
) -> dict:
    """Write the head, the plot and figures.json, which is returned."""
    config, target = material.objective.config, material.target.config
    export_draft(
        run.out / HEAD,
        config,
        params,
        target_name=run.target_name or str(run.target.resolve()),
        target_architectures=[target.architecture],
        dtype=run.dtype,
    )
    log.plot(f"{run.method} head")
    figures = {
        **_settings(run, material),
        "parameters": config.num_parameters,
        "held_out_loss": loss,
        "num_draft_tokens": served.num_draft_tokens,
        "acceptance_length": {f"{t:g}": stats.mean_acceptance_length for t, stats in served(params).items()},
        "seconds": float(log.rows()[-1]["seconds"]),
        "versions": versions(),
    }
    write_json(run.out / FIGURES, figures)
    return figures


def start(run: TrainingRun, material: Material) -> tuple[dict, dict, jax.Array]:
    """fp32 weights to begin with, parameters that are not trained, and the key of the steps."""
    key_of_weights, key = jax.random.split(jax.random.key(run.seed))
    params, constants = initial_params(material.objective, material.target, material.corpus.train, key_of_weights)
    return params, constants, key


def _held_out_windows(corpus: Corpus, plan: Plan) -> tuple[np.ndarray, tuple[int, int]]:
    """Held-out tokens, and a batch of windows that they fill."""
    tokens = corpus.held_out[: max(HELD_OUT_TOKENS, plan.length) + 1]
    batch, length = plan.shape
    return tokens, (min(batch, (len(tokens) - 1) // length), length)


def _check_out(run: TrainingRun):
    """Whether ``out`` can take a new run, or has one to go on with."""
    file = run.out / SETTINGS
    if run.resume and not file.is_file():
        raise ValueError(f"out={str(run.out)!r} holds no run to go on with: expected an earlier run's, or no --resume")
    if not run.resume and run.out.exists() and any(run.out.iterdir()):
        raise ValueError(f"out={str(run.out)!r} is not empty: expected a new folder, or --resume to go on with its run")


def _settings(run: TrainingRun, material: Material) -> dict:
    """What decides a run's numbers, as JSON gives it back."""
    settings = {
        "method": run.method,
        "head": dataclasses.asdict(material.objective.config),
        "plan": dataclasses.asdict(run.plan),
        "seed": run.seed,
        "dtype": run.dtype,
        "tokens": {name: len(part) for name, part in material.corpus._asdict().items()},
    }
    return json.loads(json.dumps(settings))


def _keep_settings(run: TrainingRun, material: Material):
    """Write them down, or compare with those of the run that is resumed."""
    file, ours = run.out / SETTINGS, _settings(run, material)
    if not run.resume:
        run.out.mkdir(parents=True, exist_ok=True)
        write_json(file, ours)
        return
    theirs = json.loads(file.read_text())
    for name, value in ours.items():
        if theirs.get(name) != value:
            raise ValueError(
                f"{name}={value!r}: expected {theirs.get(name)!r}, with which the run in {str(run.out)!r} began"
            )
