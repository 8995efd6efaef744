"""One training run: target and data in; out come a draft head in its public layout, a log, a plot and figures."""

import dataclasses
import functools
import importlib.util
import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jspec._validation import require
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.export import export_draft
from jspec.checkpoints.gguf.names import is_gguf
from jspec.checkpoints.layouts.stored import present_fields
from jspec.config import shards_of
from jspec.loading.compatibility import require_shards
from jspec.models.flatten import flatten
from jspec.models.sharding import build_model
from jspec.text.files import read_prompts
from jspec.text.prompts import token_ids
from jspec.train.acceptance import TEMPERATURES, ServedAcceptance
from jspec.train.checkpoints import Checkpoints
from jspec.train.data import Corpus, read_corpus
from jspec.train.data_parallel import loss_beside, replicate_beside
from jspec.train.loop import TrainingPlan, TrainingProgress, fit, make_evaluator
from jspec.train.methods import Sizes, initial_params, make_objective
from jspec.train.objectives import Objective
from jspec.train.report import FIGURES_FILE, Log, versions, write_json

HEAD_FOLDER, STATE_FOLDER, SETTINGS_FILE = "head", "state", "settings.json"
MAX_HELD_OUT_TOKENS = 2**18  # more would make evaluations slow and the held-out loss hardly more exact


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """The settings of one training run.

    Attributes:
      method: the name of a method that ``jspec.registry.trained`` lists.
      target: checkpoint folder of the target, or its GGUF file.
      data: file or folder of texts or token ids; ``read_corpus`` says which kinds there are.
      out: folder that the run writes. The draft head goes to ``head/`` and the training states to ``state/``.
      plan: number of steps, batch size and optimizer.
      sizes: dimensions and options of the draft head.
      prompts: on how many excerpts of the held-out text acceptance is measured; or a file of prompts for that, which
        become a user's messages where the target has a chat template.
      dtype: ``bfloat16`` or ``float32``, in which target and draft head compute. Master weights and the optimizer's
        state are fp32 in both cases.
      seed: seeds the initial weights, the windows and the noise.
      resume: whether to continue from the newest state in ``out``.
      start: folder of a draft head whose weights the run starts from, of the config that ``method`` and ``sizes`` give. None
        starts a new head.
      target_name: name or path of the target that is written into the head's config, in the layouts that have a field
        for it. None writes the absolute path of ``target``.
      tensor_parallel: N, number of devices over which the target is sharded (``jspec.load``). Each trains the draft head on
        1 / N of the windows of a step.
      expert_parallel: whether each of these devices has some of the experts instead of a part of each.

    Example::

        plan = TrainingPlan(steps=4000, peak_rate=1e-3, weight_decay=0.1)
        paths = [pathlib.Path("path/to/target"), pathlib.Path("path/to/texts"), pathlib.Path("path/to/run")]
        run = TrainingRun("eagle3", *paths, plan, Sizes(num_draft_tokens=7))
    """

    method: str
    target: pathlib.Path
    data: pathlib.Path
    out: pathlib.Path
    plan: TrainingPlan
    sizes: Sizes = dataclasses.field(default_factory=Sizes)
    prompts: int | pathlib.Path = 16
    dtype: str = "bfloat16"
    seed: int = 0
    resume: bool = False
    start: pathlib.Path | None = None
    target_name: str | None = None
    tensor_parallel: int = 1
    expert_parallel: bool = False


@dataclasses.dataclass(frozen=True)
class TrainingInputs:
    """The loaded target, data and objective of a run.

    Attributes:
      target: the target's module, in the run's dtype; sharded with ``tensor_parallel``.
      corpus: token ids to train on, and held-out ones.
      objective: the draft head's config and its loss.
      prompts: how many excerpts acceptance is measured on, or prompts as token ids.
    """

    target: Any
    corpus: Corpus
    objective: Objective
    prompts: int | list[list[int]]


def prepare(run: TrainingRun) -> TrainingInputs:
    """Load the target, tokenise the data and choose the objective.

    Raises:
      ValueError: an argument or a file cannot be used. The message names it and says what was expected.
    """
    given = run.prompts
    require(isinstance(given, pathlib.Path) or given >= 1, "prompts", given, "an integer of at least 1")
    texts = read_prompts(given) if isinstance(given, pathlib.Path) else []
    if not run.target.is_dir() and not is_gguf(run.target.name):
        raise ValueError(f"target={str(run.target)!r}: expected a checkpoint folder, or a GGUF file")
    checkpoint = Checkpoint.open(run.target)
    config, params = checkpoint.language_model(run.dtype)
    if jax.process_count() > 1:
        raise ValueError(f"{jax.process_count()} processes train together: expected one, with all GPUs of the target")
    shards, _ = shards_of(run.tensor_parallel, 1, True, run.expert_parallel)
    require_shards((shards, None), config, None)
    objective = make_objective(run.method, config, run.sizes)
    if run.start is not None:
        _require_head(run.start, objective.config)
    length, longest = run.plan.length, config.max_position
    shortest = objective.depths + 2  # a window then has a distribution to compare with at every depth
    require(shortest <= length <= longest, "length", length, f"in {shortest}..{longest}, the target's positions")
    _require_windows(run.plan, run.tensor_parallel)
    corpus = read_corpus(run.data, checkpoint.tokenizer, config.vocab_size, config.eos_token_ids, length)
    _held_out_windows(corpus, run)  # raises if there are too few
    prompts = given if isinstance(given, int) else token_ids(texts, checkpoint.tokenizer, config, None)
    return TrainingInputs(build_model(config.for_length(length), params, run.dtype, shards), corpus, objective, prompts)


def _require_head(start: pathlib.Path, expected: Any):
    """Raise a ValueError unless a folder holds a draft head of this config."""
    found = Checkpoint.open(start).config
    if type(found) is not type(expected):
        raise ValueError(f"start={str(start)!r}: expected a draft head for method {expected.method!r}")
    for field in dataclasses.fields(expected):
        has, wants = (getattr(config, field.name) for config in (found, expected))
        if has != wants:
            raise ValueError(
                f"start={str(start)!r}: its head has {field.name}={has!r}; expected {wants!r}, as the sizes of this run say"
            )


def _require_windows(plan: TrainingPlan, devices: int):
    """Raise a ValueError unless the windows of a step can be divided evenly among the devices."""
    B, T = plan.batch_shape
    expected = f"{devices} windows of {T} tokens or a multiple, as many for each device of tensor_parallel={devices}"
    require(B % devices == 0, "tokens_per_step", plan.tokens_per_step, expected)


def train(run: TrainingRun) -> dict:
    """Train a draft head, write it to ``out/head``, and return the content of figures.json.

    Raises:
      ValueError: an argument or a file cannot be used. The message names it and says what was expected.
      FloatingPointError: training diverged.

    Example::

        plan = TrainingPlan(steps=4000, peak_rate=1e-3, weight_decay=0.1)
        paths = [pathlib.Path("path/to/target"), pathlib.Path("path/to/texts"), pathlib.Path("path/to/run")]
        figures = train(TrainingRun("eagle3", *paths, plan))
        llm = jspec.load("path/to/target", draft="path/to/run/head")
    """
    if importlib.util.find_spec("matplotlib") is None:  # for the plot
        raise ValueError("training needs matplotlib, which is not installed: pip install 'jspec[train]'")
    _check_output_folder(run)
    inputs = prepare(run)
    _write_or_check_settings(run, inputs)
    store = Checkpoints(run.out / STATE_FOLDER)
    target, objective, plan = inputs.target, inputs.objective, run.plan
    params, constants, key = initialise(run, inputs)
    loss, frozen = loss_beside(objective, target, run.dtype), (flatten(target).leaves, constants)
    evaluate = make_evaluator(loss, *_held_out_windows(inputs.corpus, run))
    served = ServedAcceptance(
        target, objective.config, inputs.corpus.held_out, inputs.prompts, objective.depths, run.dtype
    )
    log = Log(run.out, TEMPERATURES, resume_step=-1 if store.step is None else store.step)

    def report(progress: TrainingProgress, params):
        tqdm.write(log.add(progress, served({**params, **constants})))

    if store.step is None:
        report(TrainingProgress(0, 0.0, math.nan, evaluate(params, frozen)), params)
    place = functools.partial(replicate_beside, target)
    tokens = place(jnp.asarray(inputs.corpus.train))
    best = fit(plan, loss, evaluate, params, frozen, tokens, key, report, store, place)
    return _finish(run, inputs, {**best, **constants}, evaluate(best, frozen), served, log)


def _finish(
    run: TrainingRun, inputs: TrainingInputs, params: dict, held_out_loss: float, served: ServedAcceptance, log: Log
) -> dict:
    """Write the draft head, the plot and figures.json, and return the content of figures.json."""
    config, target = inputs.objective.config, inputs.target.config
    export_draft(
        run.out / HEAD_FOLDER,
        config,
        params,
        target_name=run.target_name or str(run.target.resolve()),
        target_architectures=[target.architecture],
        dtype=run.dtype,
    )
    log.plot(f"{run.method} head")
    figures = {
        **_settings(run, inputs),
        "tensor_parallel": run.tensor_parallel,
        "parameters": config.num_parameters,
        "held_out_loss": held_out_loss,
        "num_draft_tokens": served.num_draft_tokens,
        "acceptance_length": {f"{t:g}": stats.mean_acceptance_length for t, stats in served(params).items()},
        "seconds": float(log.entries()[-1]["seconds"]),
        "versions": versions(),
    }
    write_json(run.out / FIGURES_FILE, figures)
    return figures


def initialise(run: TrainingRun, inputs: TrainingInputs) -> tuple[dict, dict, jax.Array]:
    """Initial fp32 weights, constant parameters, and the key for ``fit``, on every device of the target."""
    weight_key, key = jax.random.split(jax.random.key(run.seed))
    params, constants = initial_params(inputs.objective, inputs.target, inputs.corpus.train, weight_key)
    if run.start is not None:
        head = Checkpoint.open(run.start).params("float32")
        params, constants = ({name: jnp.asarray(head[name]) for name in part} for part in (params, constants))
    return replicate_beside(inputs.target, (params, constants, key))


def _held_out_windows(corpus: Corpus, run: TrainingRun) -> tuple[np.ndarray, tuple[int, int]]:
    """The held-out tokens to evaluate on, ``[N]``, and a batch shape (B, T) of which they fill at least one batch.

    B is that of a step. If there are fewer windows, it is their number, or the next lower one that the devices divide.

    Raises:
      ValueError: there are fewer windows than devices.
    """
    batch, length = run.plan.batch_shape
    tokens, devices = corpus.held_out[: max(MAX_HELD_OUT_TOKENS, length) + 1], run.tensor_parallel
    windows = (len(tokens) - 1) // length
    if windows < devices:
        raise ValueError(
            f"data={str(run.data)!r}: {windows} held-out windows of {length} tokens; expected one for each device of "
            f"tensor_parallel={devices}: more text, or a smaller length"
        )
    return tokens, (min(batch, windows // devices * devices), length)


def _check_output_folder(run: TrainingRun):
    """Raise a ValueError unless ``out`` is empty, or holds the run to resume."""
    file = run.out / SETTINGS_FILE
    if run.resume and not file.is_file():
        raise ValueError(f"out={str(run.out)!r} holds no run to resume: expected the folder of one, or no --resume")
    if not run.resume and run.out.exists() and any(run.out.iterdir()):
        raise ValueError(f"out={str(run.out)!r} is not empty: expected a new folder, or --resume to continue its run")


def _settings(run: TrainingRun, inputs: TrainingInputs) -> dict:
    """All settings that the numbers of a run depend on, in the types that JSON reads back (lists, not tuples)."""
    objective: Any = inputs.objective
    aims = {
        field.name: getattr(objective, field.name) for field in dataclasses.fields(objective) if field.name != "config"
    }
    settings = {
        "method": run.method,
        "head": dataclasses.asdict(objective.config),
        "objective": aims,
        "plan": dataclasses.asdict(run.plan),
        "seed": run.seed,
        "start": None if run.start is None else str(run.start),
        "dtype": run.dtype,
        "tokens": {name: len(part) for name, part in inputs.corpus._asdict().items()},
    }
    return json.loads(json.dumps(settings))


def _write_or_check_settings(run: TrainingRun, inputs: TrainingInputs):
    """Write settings.json for a new run; for a resumed one raise ValueError if a setting differs from the file."""
    file, settings = run.out / SETTINGS_FILE, _settings(run, inputs)
    if not run.resume:
        run.out.mkdir(parents=True, exist_ok=True)
        write_json(file, settings)
        return
    earlier = json.loads(file.read_text())
    if "layers" in earlier.get("head", {}):
        earlier["head"]["layers"] = json.loads(json.dumps(present_fields(earlier["head"]["layers"])))
    for name, value in settings.items():
        if earlier.get(name) != value:
            raise ValueError(
                f"{name}={value!r}: expected {earlier.get(name)!r}, with which the run in {str(run.out)!r} began"
            )
