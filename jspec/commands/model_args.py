"""Options of model and speculation, under vLLM's names, of ``jspec serve`` and ``jspec bench``."""

import argparse
import dataclasses
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from jspec._validation import require, resolve_names
from jspec.commands.group_args import group_of
from jspec.config import DRAFT_SAMPLINGS, VERIFY_RULES, Speculation, TreeShape
from jspec.config.engine import ACTIVATION_DTYPES, KV_CACHE_DTYPES
from jspec.registry import MTP, NGRAM

if TYPE_CHECKING:
    from jspec.llm import LLM

# Option of the command -> argument of ``jspec.load``; ``max_waiting`` is a server's alone.
_LOADING = {
    "max_model_len": "max_len",
    "max_num_seqs": "max_batch",
    "num_gpu_blocks_override": "num_pages",
    "block_size": "page_size",
    "tensor_parallel_size": "tensor_parallel",
    "enable_expert_parallel": "expert_parallel",
}
_SAME = ("dtype", "kv_cache_dtype", "activation_dtype", "gpu_memory_utilization", "swap_space", "snapshot_every")
_SAME += ("snapshot_space", "max_waiting", "logprobs_mode", "ngram_corpus", "download")
_LOADING |= {name: name for name in _SAME}
_DRAFT_PARALLEL = "draft_tensor_parallel_size"  # a key of vLLM's --speculative-config
# vLLM's name of a drafting method -> jspec's. It has called ``mtp`` by the name of each family as well.
_METHODS = {"deepseek_mtp": MTP, "glm4_moe_lite_mtp": MTP, "mlp_speculator": "mlp"} | {
    name: name
    for name in ("dflash", "draft_model", "dspark", "eagle", "eagle3", "medusa", MTP, NGRAM, "parallel", "xpress")
}
_IN_TARGET = (MTP, NGRAM)  # methods that need no checkpoint beside the target's


@dataclasses.dataclass(frozen=True)
class ChosenModel:
    """The model that the options of a command name, before it is loaded.

    Attributes:
      target: the folder of the target.
      draft: the folder of the draft, ``mtp``, ``ngram``, or None.
      speculation: how to draft and to verify.
      method: the drafting method that the draft has to have; None for any.
      loading: further arguments of ``jspec.load``.
      group: arguments of ``jax.distributed.initialize``, where several processes run the target; None for one.
    """

    target: str
    draft: str | None
    speculation: Speculation
    method: str | None
    loading: dict[str, Any]
    group: dict[str, Any] | None = None

    def ran_as_follower(self) -> bool:
        """Join the group of processes, if the options name one. A follower replays the leader's dispatches until the
        leader ends, and returns True; the caller then has nothing left to do.

        Raises:
          ValueError, RuntimeError: JAX could not connect the processes.
        """
        if self.group is None:
            return False
        import jax

        jax.distributed.initialize(**self.group)
        if not jax.process_index():
            return False
        self.load().follow()
        return True

    def load(self) -> "LLM":
        """Load the model.

        Raises:
          ValueError: as for ``jspec.load``, or the draft is of another method.
        """
        import jspec  # here, so that declaring and reading options does not import JAX

        llm = jspec.load(self.target, self.draft, speculation=self.speculation, **self.loading)
        ok = self.method in (None, llm.method)
        require(ok, "speculative_config.method", self.method, f"{llm.method}, which the draft is")
        return llm


def chosen_model(args: argparse.Namespace) -> ChosenModel:
    """The model that the options name.

    Raises:
      ValueError: an option is given twice, a value cannot be used, or a folder has no checkpoint.
      TypeError: a key of ``--speculative-config`` is unknown.
    """
    target, draft = local_models(args)
    _, speculation, method = speculation_of(args)
    require_draft(args, target, draft)
    return ChosenModel(target, draft, speculation, method, loading_of(args), group_of(args))


def add_model_options(parser: argparse.ArgumentParser, max_num_seqs: int | None = 64):
    """Declare the target, and how to load it.

    Args:
      parser: of a command.
      max_num_seqs: the default of that option; None where the command computes one.
    """
    parser.add_argument(
        "target", help="checkpoint folder, GGUF file, or the name of a model on the hub, org/name[@revision][:Q4_K_M]"
    )
    add_download_option(parser)
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default="auto",
        help="type of the target's cached keys and values, or latents; auto: that of the model, or fp8 if the checkpoint is "
        "made for it",
    )
    parser.add_argument(
        "--activation-dtype",
        choices=ACTIVATION_DTYPES,
        default="auto",
        help="type to which the target's linear maps round their inputs; auto: none, that of the model; int8 or fp8: W8A8, "
        "for weights stored so with a scale for each output channel",
    )
    parser.add_argument(
        "--max-model-len", type=int, help="longest prompt plus completion; the target's, as memory allows"
    )
    most = "as many as the batch has" if max_num_seqs is None else "%(default)s"
    parser.add_argument("--max-num-seqs", type=int, default=max_num_seqs, help=f"requests decoded together; {most}")
    parser.add_argument("--gpu-memory-utilization", type=float, help="share of the GPU's free memory; 0.9")
    add_shard_options(parser)
    parser.add_argument("--num-gpu-blocks-override", type=int, metavar="N", help="pages of the KV cache; what fits")
    parser.add_argument("--block-size", type=int, help="tokens of a page; 64")
    parser.add_argument("--swap-space", type=float, metavar="GIB", help="host memory for preempted requests; 4")
    parser.add_argument(
        "--snapshot-every",
        type=int,
        metavar="N",
        help="tokens of a prompt between snapshots of recurrent states, of a model that has them; 1024",
    )
    parser.add_argument("--snapshot-space", type=float, metavar="GIB", help="host memory for these snapshots; 8")
    parser.add_argument(
        "--no-enable-prefix-caching", action="store_true", help="prefill every prompt from its first token"
    )
    parser.add_argument("--reproducible", action="store_true", help="a seed means one text; slower")
    parser.add_argument(
        "--generation-config",
        choices=("auto", "jspec", "vllm"),
        default="auto",
        help="auto: sampling defaults are the checkpoint's; jspec or vllm: they are those of SamplingParams",
    )


def add_download_option(parser: argparse.ArgumentParser):
    """Declare ``--download``, which every command has that takes names of models."""
    parser.add_argument(
        "--download",
        action="store_true",
        default=None,
        help="download models that are given by name from the Hugging Face hub, as far as the local cache lacks them; "
        "without it a terminal is asked, and the local cache is used otherwise",
    )


def add_shard_options(parser: argparse.ArgumentParser):
    """Declare the options of tensor and expert parallelism, which ``jspec train`` has too."""
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, metavar="N", help="GPUs of the target; 1")
    parser.add_argument(
        "--enable-expert-parallel", action="store_true", default=None, help="each of these GPUs has some of the experts"
    )


def add_speculation_options(parser: argparse.ArgumentParser):
    """Declare the options of speculation."""
    group = parser.add_argument_group("speculation")
    group.add_argument("--draft", help="checkpoint folder, GGUF file, the name of a model on the hub, mtp, or ngram")
    group.add_argument(
        "--num-speculative-tokens", type=draft_count_of, metavar="K", help="drafts of a round, or auto; 4"
    )
    group.add_argument("--verify", choices=VERIFY_RULES)
    group.add_argument("--draft-sampling", choices=DRAFT_SAMPLINGS)
    group.add_argument("--ngram-corpus", metavar="FILE", help="text to look drafts up in, with --draft ngram")
    add_verifying_options(group)
    group.add_argument(
        "--speculative-config", metavar="JSON", help='vLLM\'s: {"model": .., "num_speculative_tokens": .., ..}'
    )


def add_verifying_options(parser):
    """Declare ``--verify-budget``, ``--lookup`` and ``--tree``, for a parser or a group of its options."""
    budget = "tokens that the target reads in a round for each request, on average, or auto; every draft"
    parser.add_argument("--verify-budget", type=budget_of, metavar="N", help=budget)
    parser.add_argument(
        "--lookup",
        action="store_true",
        default=None,
        help="beside a draft: where the newest tokens occur earlier in a request's text, draft what followed them",
    )
    tree = "trees of drafts of an EAGLE head or a block drafter: nodes, depth and branch, or auto; with 32 it is 32,6,4"
    parser.add_argument("--tree", type=tree_of, metavar="N[,N[,N]]", help=tree)


def tree_of(text: str) -> TreeShape | Literal["auto"]:
    """The shape that ``--tree`` gives."""
    if text == "auto":
        return "auto"
    numbers = text.split(",")
    if not (len(numbers) <= 3 and all(number.strip().isdecimal() for number in numbers)):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected nodes, depth and branch, 32,6,4 for example, or nodes alone, or auto"
        )
    try:
        return TreeShape(*map(int, numbers))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def loading_of(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``jspec.load`` that the options set, without those of speculation."""
    given_options = vars(args)
    given = {name: given_options[option] for option, name in _LOADING.items() if given_options.get(option) is not None}
    if given.get("dtype") == "auto":
        del given["dtype"]
    given["reproducible"] = args.reproducible
    given["prefix_cache"] = not args.no_enable_prefix_caching
    if args.speculative_config is not None and _DRAFT_PARALLEL in json.loads(args.speculative_config):
        given["draft_tensor_parallel"] = json.loads(args.speculative_config)[_DRAFT_PARALLEL]
    given["generation_config"] = "auto" if args.generation_config == "auto" else "jspec"
    return given


def speculation_of(args: argparse.Namespace) -> tuple[str | None, Speculation, str | None]:
    """The draft, the settings of speculation and the required method, from ``--speculative-config`` or single options.

    Raises:
      ValueError: an option is given twice, or a value cannot be used.
      TypeError: a key of the JSON is unknown.
    """
    options = {
        "num_draft_tokens": args.num_speculative_tokens,
        "verify": args.verify,
        "draft_sampling": args.draft_sampling,
        "verify_budget": args.verify_budget,
        "lookup": args.lookup,
        "tree": args.tree,
    }
    fields = {name: value for name, value in options.items() if value is not None}
    draft, method = args.draft, None
    if args.speculative_config is not None:
        beside = [name for name, value in {"draft": draft, **fields}.items() if value is not None]
        ok = not beside
        require(ok, "speculative_config", args.speculative_config, f"it alone, without --{beside and beside[0]}")
        draft, fields, method = _config(args.speculative_config)
    return draft, Speculation(**fields), method


def local_models(args: argparse.Namespace) -> tuple[str, str | None]:
    """The folders of the target and of the draft that the options name, downloaded if the user agrees; the draft as it is
    if it has no folder.

    Raises:
      ValueError: one is neither a folder nor in the local hub cache, and was not downloaded, or options exclude each other.
    """
    draft, *_ = speculation_of(args)
    given = [args.target] if draft in (None, *_IN_TARGET) else [args.target, draft]
    from jspec.hub.folders import local_checkpoints  # here, because it reads checkpoints, which take a second to import

    target, *drafts = local_checkpoints(given, args.download)
    return target, drafts[0] if drafts else draft


def require_draft(args: argparse.Namespace, target: str, draft: str | None):
    """Check that options of speculation come with a draft, given or named by a draft head in place of the target.

    Raises:
      ValueError: there is no draft.
    """
    from jspec.loading.pair import open_checkpoints

    options = ("num_speculative_tokens", "verify", "draft_sampling", "verify_budget", "ngram_corpus", "lookup", "tree")
    given = [name for name in options if getattr(args, name) is not None]
    if draft is None and given and open_checkpoints(target, None, download=args.download)[1] is None:
        value = getattr(args, given[0])
        raise ValueError(f"{given[0]}={value!r}: expected --draft beside it, a checkpoint folder, mtp or ngram")


def _config(text: str) -> tuple[str, dict[str, Any], str | None]:
    """The draft, fields of ``Speculation`` and the required method, from vLLM's JSON."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    example = '{"model": "FOLDER", "num_speculative_tokens": 4}'
    if not isinstance(given, dict):
        raise ValueError(f"speculative_config={text!r}: expected a JSON object, {example} for example")
    known = [field.name for field in dataclasses.fields(Speculation) if field.name != "synthetic_acceptance"]
    aliases = {**Speculation.aliases, "prompt_lookup_max": "ngram_max", "prompt_lookup_min": "ngram_min"}
    fields = resolve_names("speculative_config", given, [*known, "model", "method", _DRAFT_PARALLEL], aliases)
    fields.pop(_DRAFT_PARALLEL, None)  # an argument of ``load``
    draft, method = fields.pop("model", None), fields.pop("method", None)
    ok = method is None or method in _METHODS
    require(ok, "speculative_config.method", method, f"one of {', '.join(sorted(_METHODS))}, or none")
    required = None if method is None else _METHODS[method]
    if required in _IN_TARGET:
        require(draft in (None, required), "speculative_config.model", draft, f"none beside the method {method}")
        draft, required = required, None
    expected = "a checkpoint folder, or the method mtp or ngram"
    require(isinstance(draft, str), "speculative_config.model", draft, expected)
    return draft, fields, required


def checkpoint_folder(name: str) -> str:
    """The folder of a checkpoint, or the GGUF file: ``name`` itself, or the model of this name in the local hub cache.

    Nothing is downloaded, and the weights need not be there.

    Raises:
      ValueError: neither exists.
    """
    if os.path.exists(name):
        return name
    from jspec.hub.cache import cached_folder, snapshot_of
    from jspec.hub.names import repository_of

    repository = repository_of(name)
    folder = None if repository is None else cached_folder(repository)
    if repository is not None and repository.file is not None:
        folder = found.place if (found := snapshot_of(repository)) is not None else None
    if folder is None:
        raise ValueError(
            f"{name!r} is no folder, and the local hub cache has no such model: expected a checkpoint folder, or run "
            f"hf download {name} first"
        )
    return str(folder)


def _or_auto(kind: Callable[[str], Any], expected: str) -> Callable[[str], Any]:
    """The value in an option's text: of a kind, or ``auto``."""

    def value_of(text: str) -> Any:
        try:
            return text if text == "auto" else kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}, or auto") from None

    return value_of


draft_count_of = _or_auto(int, "an integer")
budget_of = _or_auto(float, "a number of tokens")  # of the tokens that the target reads in a round
