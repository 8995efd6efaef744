"""The arguments of ``jspec train``."""

import argparse
import dataclasses
import pathlib
from typing import Any

from jspec.commands.model_args import add_download_option, add_shard_options
from jspec.registry import trained

METHODS = tuple(trained())


def add_arguments(parser: argparse.ArgumentParser):
    """Declare the arguments, without importing JAX."""
    parser.add_argument("--method", choices=METHODS, required=True, help="kind of draft head")
    parser.add_argument(
        "--target", required=True, help="checkpoint folder or GGUF file of the target, or its name on the hub"
    )
    add_download_option(parser)
    parser.add_argument(
        "--data",
        type=pathlib.Path,
        required=True,
        help="file or folder of .txt, .py, .md, .jsonl; or .npz of token ids",
    )
    parser.add_argument(
        "--out", type=pathlib.Path, required=True, help="folder for head/, losses.csv, figures.json, state/"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the newest state in OUT")
    parser.add_argument(
        "--start",
        type=pathlib.Path,
        metavar="HEAD",
        help="start from the weights of this draft head, which has the sizes below; default: a new head",
    )
    parser.add_argument(
        "--target-name",
        help="name of the target in the head's config.json, in layouts that have it; default: its path, or the name given",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="dtype of the computations of target and head",
    )
    add_shard_options(parser)

    plan = parser.add_argument_group("plan")
    plan.add_argument("--steps", type=int, default=10_000)
    plan.add_argument(
        "--peak-rate", type=float, default=3e-4, help="peak learning rate, after a warm-up; then a cosine to 0"
    )
    plan.add_argument("--weight-decay", type=float, default=0.0)
    plan.add_argument("--tokens-per-step", type=int, default=8192)
    plan.add_argument("--length", type=int, default=1024, help="tokens of a window")
    plan.add_argument(
        "--evaluate-every", type=int, default=500, help="steps between two evaluations, and between two states"
    )
    plan.add_argument(
        "--prompts",
        type=_count_or_file,
        default=16,
        metavar="N|FILE",
        help="what acceptance is measured on: N excerpts of the held-out text, 16 by default, or a file of prompts, as for "
        "jspec doctor",
    )

    head = parser.add_argument_group(
        "head", "sizes of the draft head; by default the target's, or what is usual for the method"
    )
    head.add_argument(
        "--num-draft-tokens",
        type=int,
        help="drafts to learn; default: 7 (dspark, dflash, eagle3), 8 (parallel), 4 (mlp: stages) or 3 (medusa: Medusa "
        "heads, mtp: passes)",
    )
    head.add_argument(
        "--layers", type=int, help="decoder layers; default: 5 (dspark, dflash), 1 (eagle3) or 4 (parallel)"
    )
    head.add_argument(
        "--intermediate-size", type=int, help="of all heads with decoder layers: width of the layers' MLP"
    )
    head.add_argument(
        "--draft-vocab-size",
        type=int,
        help="dspark, dflash, eagle3, parallel: tokens that it can draft, the most frequent of DATA",
    )
    head.add_argument(
        "--aux-layers",
        "--taps",
        type=_integers,
        help="dspark, dflash, eagle3, parallel: it reads hidden states after these layers of the target, e.g. 2,16,29",
    )
    head.add_argument("--inner-size", type=int, help="mlp: width of the state")
    head.add_argument("--tie", action="store_true", help="mlp: stages share their weights")
    head.add_argument(
        "--borrow-head", action="store_true", help="medusa: use the target's output head instead of own ones"
    )
    head.add_argument(
        "--markov", help="dspark: how a draft depends on the one before it: vanilla (default), gated or rnn"
    )
    head.add_argument("--markov-rank", type=int, help="dspark: the rank of that; default: 256")
    head.add_argument(
        "--loss",
        help="dspark, dflash: published (default), the loss of the method's authors, or soft, the cross-entropy against the "
        "target's distributions",
    )
    head.add_argument(
        "--anchor-spacing",
        type=int,
        help="dspark, dflash: tokens of a window for each block that is filled; default: 8",
    )


def run(args: argparse.Namespace) -> int:
    """Train a draft head, and print its size and acceptance lengths; returns the exit code."""
    from jspec.train.loop import TrainingPlan
    from jspec.train.methods import Sizes
    from jspec.train.run import HEAD_FOLDER, TrainingRun, train

    folder = _folder(args.target, args.download)
    run_settings = TrainingRun(
        method=args.method,
        target=folder,
        data=args.data,
        out=args.out,
        plan=TrainingPlan(**_fields_of(TrainingPlan, args)),
        sizes=Sizes(**_fields_of(Sizes, args)),
        prompts=args.prompts,
        dtype=args.dtype,
        seed=args.seed,
        resume=args.resume,
        start=args.start,
        target_name=args.target_name or (None if folder == pathlib.Path(args.target) else args.target),
        tensor_parallel=1 if args.tensor_parallel_size is None else args.tensor_parallel_size,
        expert_parallel=bool(args.enable_expert_parallel),
    )
    try:
        figures = train(run_settings)
    except FloatingPointError as error:  # a setting caused it, so it is reported as a mistake in the arguments
        raise ValueError(str(error)) from error
    lengths = ", ".join(f"{length:.2f} at temperature {t}" for t, length in figures["acceptance_length"].items())
    print(f"{args.out / HEAD_FOLDER}: {figures['parameters']:,} parameters, acceptance length {lengths}")
    return 0


def _fields_of(kind: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a dataclass that are arguments, which have the same names."""
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(kind) if field.name in args}


def _folder(target: str, download: bool | None) -> pathlib.Path:
    """The folder of the target, downloaded if it is a name on the hub and the user agrees."""
    from jspec.hub.folders import local_checkpoints
    from jspec.hub.names import is_hub_name

    return pathlib.Path(local_checkpoints([target], download)[0] if is_hub_name(target) else target)


def _count_or_file(text: str) -> int | pathlib.Path:
    return int(text) if text.removeprefix("-").isdecimal() else pathlib.Path(text)


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected integers with commas between, e.g. 2,16,29") from None
