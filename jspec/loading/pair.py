"""Opens target and draft, checks that their configs are compatible, and builds their modules."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jspec._validation import is_one_of, require
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.files.gguf import refuse_gguf
from jspec.checkpoints.layouts.options import NO_OPTIONS, HeadOptions
from jspec.config import ModelConfig, Shards, Speculation
from jspec.config.heads import AssistantConfig, DraftConfig, HeadConfig
from jspec.drafting.base import Drafter
from jspec.drafting.methods import drafter_for
from jspec.engine.multihost.leader import fewest
from jspec.hub.folders import local_checkpoints
from jspec.hub.names import is_hub_name
from jspec.loading.compatibility import (
    check_options,
    check_states,
    check_tokenizers,
    with_available_drafts,
    with_positions,
)
from jspec.models import Decoder, build, build_head
from jspec.models.sharding import build_shards, mesh_of, on_every_device
from jspec.registry import MTP, DraftMethod, choose, chosen_by_name, resolve
from jspec.sampling.params import SamplingParams
from jspec.text.detokenizer import Tokenizer

Path = str | pathlib.Path
# The fields of generation_config.json that jspec follows.
ADOPTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclasses.dataclass(frozen=True)
class Pair:
    """The checkpoints of a target and of its drafter, opened.

    Attributes:
      target: the target's checkpoint.
      draft: the draft's checkpoint, a drafting method that has none, as n-gram lookup, or None for plain decoding.
      arguments: the arguments of ``jspec.load`` that such methods need -> their values.
    """

    target: Checkpoint
    draft: Checkpoint | DraftMethod | None
    arguments: Mapping[str, Any]

    def require_intact(self, hash_all: bool = True):
        """As ``Checkpoint.require_intact``, of both checkpoints."""
        for checkpoint in (self.target, self.draft):
            if isinstance(checkpoint, Checkpoint):
                checkpoint.require_intact(hash_all)


@dataclasses.dataclass(frozen=True)
class CheckedPair:
    """A pair whose configs were read and are compatible. No weights are read yet.

    Attributes:
      pair: the pair.
      target: the target's config.
      draft: what drafts: the config of a draft model or draft head, the name of a method that has no checkpoint, or None
        for plain decoding.
      speculation: how to draft, with no more drafts than the draft has weights for.
    """

    pair: Pair
    target: ModelConfig
    draft: DraftConfig | str | None
    speculation: Speculation

    @property
    def draft_config(self) -> DraftConfig | None:
        """The draft's config; None if there is no draft checkpoint."""
        return None if isinstance(self.draft, str) else self.draft

    @property
    def num_draft_tokens(self) -> int:
        """K, the largest if the engine chooses it; 0 for plain decoding."""
        return 0 if self.draft is None else self.speculation.most_draft_tokens


def open_pair(
    target: Path,
    draft: Path | None,
    options: HeadOptions,
    arguments: Mapping[str, Any],
    speculation: Speculation,
    download: bool | None = False,
) -> Pair:
    """The pair that the arguments of ``jspec.load`` name. A draft that never drafts, because K is 0, is left out.

    Raises:
      ValueError: a folder that is none, or an argument that the drafting method does not take.
    """
    method = choose(draft, arguments)
    target_checkpoint, draft_checkpoint = open_checkpoints(target, draft, options, download)
    drafts = speculation.most_draft_tokens > 0
    return Pair(target_checkpoint, (draft_checkpoint or method) if drafts else None, arguments)


def open_checkpoints(
    target: Path, draft: Path | None, options: HeadOptions = NO_OPTIONS, download: bool | None = False
) -> tuple[Checkpoint, Checkpoint | None]:
    """The checkpoints of a target and of its draft, None if it has none.

    A draft head in the speculators format names its target. It can be given alone, as ``target``. Multi-token prediction
    layers are in the folder of the target.

    Args:
      target, draft, options: folders, or names on the hub, and what the user said of a draft head.
      download: whether names may be downloaded; ``jspec.hub.folders.local_checkpoints`` explains True, False and None.
    """
    by_name = is_one_of(draft, (None, *chosen_by_name()))
    target, *drafts = _folders({"target": target} if by_name else {"target": target, "draft": draft}, download)
    checkpoint = Checkpoint.open(target)
    if is_one_of(draft, (MTP,)):
        return checkpoint, checkpoint.mtp(options)
    if draft is not None:
        return checkpoint, Checkpoint.open(drafts[0], options) if drafts else None
    if checkpoint.target_name is None:
        return checkpoint, None
    head = Checkpoint(checkpoint.folder, options)
    return Checkpoint.open(_target_folder(head.folder.given, checkpoint.target_name, download)), head


def default_params(target: Checkpoint, generation_config: str) -> SamplingParams:
    """The defaults of the arguments of ``generate``.

    As in vLLM, the fields ``ADOPTED`` come from the checkpoint's ``generation_config.json``. Other fields of that file,
    ``do_sample`` for example, are ignored.

    Args:
      target: the target's checkpoint.
      generation_config: ``auto`` reads that file, ``jspec`` does not.

    Raises:
      ValueError: ``generation_config`` is neither, or the file holds a value that cannot be used.
    """
    known = ("auto", "jspec")
    ok = isinstance(generation_config, str) and generation_config in known
    require(ok, "generation_config", generation_config, "'auto', the checkpoint's own defaults, or 'jspec', jspec's")
    if generation_config == "jspec":
        return SamplingParams()
    fields = target.generation_config
    given = {name: fields.raw[name] for name in ADOPTED if fields.raw.get(name) is not None}
    try:
        return SamplingParams(**given)
    except ValueError as error:
        raise ValueError(f"{fields.where}: {error}; correct it, or load with generation_config='jspec'") from None


def check_pair(pair: Pair, speculation: Speculation, max_len: int) -> CheckedPair:
    """The pair with its configs, after everything but weights was read and checked.

    Args:
      pair: target and draft.
      speculation: how to draft.
      max_len: the longest text, in tokens.

    Raises:
      ValueError: the draft was made for another target, or has no use for an option of ``speculation``.
    """
    tokenizer, target = pair.target.tokenizer, pair.target.target_config.for_length(max_len)
    draft: DraftConfig | str | None = None
    if isinstance(pair.draft, Checkpoint):
        config = pair.draft.config
        speculation = with_available_drafts(speculation, config)
        check_compatible(target, config, tokenizer, pair.draft)
        draft = with_positions(target, config, max_len)
    elif pair.draft is not None:
        draft = pair.draft.name
    check_options(draft, speculation)
    return CheckedPair(pair, target, draft, speculation)


def require_shards(shards: Sequence[Shards | None], target: ModelConfig, draft: DraftConfig | None):
    """Raise a ValueError unless target and draft can be split into ``shards``, and there are so many devices."""
    if isinstance(draft, AssistantConfig) and shards[0] is not None and draft.layers.num_heads % shards[0].count:
        raise ValueError(
            f"tensor_parallel={shards[0].count}: expected a divisor of {draft.layers.num_heads}, how many attention heads "
            "an assistant has: each device attends with some of them; or draft with draft='ngram'"
        )
    for shard, config in zip(shards, (target, None if draft is None else draft.language_model), strict=True):
        if shard is not None:
            mesh_of(shard.count, shard.axis)
        if shard is not None and config is not None:
            shard.local(config)


def load_modules(
    checked: CheckedPair,
    dtype: str,
    shards: Shards | None = None,
    draft_shards: Shards | None = None,
    check_files: bool = False,
) -> tuple[Decoder, Any, Callable[..., Drafter]]:
    """The modules of a pair, from its weights.

    Args:
      checked: target and draft.
      dtype: ``bfloat16`` or ``float32``.
      shards: those of the target, each on a device of its own; None for one device.
      draft_shards: those of the draft; None if it is whole on every device.
      check_files: whether the SHA-256 of every file of both checkpoints is compared with their manifests.

    Returns:
      the target's module; the draft's module, or the arrays that a method without a checkpoint reads, or None; and what
      builds the drafter around both, as ``drafter_for`` does.
    """
    pair, draft, module = checked.pair, checked.draft, _prepared(checked)
    _, params = pair.target.language_model(dtype, check_files)
    target = build_model(checked.target, params, dtype, shards)
    if isinstance(pair.draft, Checkpoint) and checked.draft_config is not None:
        draft, module = load_draft_module(
            pair.draft, dtype, checked.draft_config, target, draft_shards, check_files=check_files
        )
    if check_files:
        pair.require_intact()
    if shards is not None and draft_shards is None and module is not None:
        module = on_every_device(module, mesh_of(shards.count, shards.axis))
    return target, module, drafter_for(draft, checked.target, checked.speculation)


def build_model(config: ModelConfig, params: Mapping[str, np.ndarray], dtype: str, shards: Shards | None) -> Decoder:
    """The module of a language model, on one device or in shards; arguments and errors as for ``build_shards``."""
    if shards is None:
        return build(config, params, dtype)
    return build_shards(config, params, dtype, shards, mesh_of(shards.count, shards.axis))


def check_compatible(
    target: ModelConfig, config: ModelConfig | HeadConfig, tokenizer: Tokenizer | None, draft: Checkpoint
):
    """Refuse a draft head of another target, a draft model with other token ids, or a PARD model with recurrent states.

    Args:
      target, config: the configs of the target and of the draft.
      tokenizer: the target's, None if its checkpoint has none.
      draft: the checkpoint that may hold the draft's tokenizer. That of a draft head is not read, because a head needs none.
    """
    config.require_fit(target)
    check_states(config)
    if config.language_model is not None:
        check_tokenizers(target, config.language_model, tokenizer, draft.tokenizer)


def load_draft_module(
    checkpoint: Checkpoint,
    dtype: str,
    config: ModelConfig | HeadConfig,
    target: Decoder,
    shards: Shards | None = None,
    check_files: bool = False,
):
    """Config and module of a draft, ready to serve.

    Args:
      checkpoint: the draft's.
      dtype: ``bfloat16`` or ``float32``.
      config: the config in the checkpoint, with the positions that are used.
      target: the target's module, whose weights a draft head may borrow.
      shards: those of a draft model; None if it is whole.
      check_files: as for ``load_modules``.
    """
    params = checkpoint.params(dtype, check_files)
    if config.language_model is not None:
        return config, build_model(config.language_model, params, dtype, shards).prepare()
    return build_draft_module(config, dict(params), dtype, target)


def build_draft_module(config: ModelConfig | HeadConfig, params: dict, dtype: str, target: Decoder):
    """Config and module of a draft, ready to serve.

    Where a draft head holds a copy of the target's embedding or output head, its module borrows the target's own array.
    The copy is deleted from ``params``, and the config that is returned says so.
    """
    if config.language_model is not None:
        return config, build(config.language_model, params, dtype).prepare()
    config = _borrow(config, params, target)
    return config, build_head(config, params, dtype).prepare()


def _borrow(config: HeadConfig, params: dict, target: Decoder) -> HeadConfig:
    """Delete from ``params`` what is a copy of a weight of the target; returns ``config`` without these weights.

    A weight of another type is not equal, so a draft head that is not quantised keeps its own beside a target that is. A
    target that divides or caps its logits would do so with the draft head's as well, so it lends no output head.
    """
    plain = target.config.logit_softcap is None and target.config.logit_divisor == 1
    lent = {
        "own_embedding": () if target.embedding_scale is not None else (target.embedding[...],),
        "own_head": jax.tree.leaves(target.output_weight) if plain else (),
    }
    for field, name in config.borrowable:
        if not getattr(config, field):
            continue
        stored = config.stored_params().get(name)
        names, theirs = [name] if stored is None else list(stored.names.values()), lent[field]
        rows = target.config.vocab_size  # of shards, the last has padding behind them
        alike = len(names) == len(theirs) and all(_same(params[n], a, rows) for n, a in zip(names, theirs, strict=True))
        if theirs and not theirs[0].is_fully_addressable:  # other processes compare their shards
            alike = bool(fewest(int(alike)))
        if alike:
            for param in names:
                del params[param]
            config = dataclasses.replace(config, **{field: False})  # pyright: ignore[reportArgumentType]
    return config


def _prepared(checked: CheckedPair) -> Any:
    """The arrays that the drafter of a method without a checkpoint reads, the tokens of a corpus say; None if none."""
    pair, method = checked.pair, checked.pair.draft
    if not isinstance(method, DraftMethod) or method.prepare is None or method.argument is None:
        return None
    return resolve(method.prepare)(pair.arguments[method.argument], pair.target.tokenizer, checked.target)


def _same(ours: np.ndarray, theirs: jax.Array, rows: int) -> bool:
    """Whether an array is equal to the first ``rows`` rows of another, as far as this process has their shards."""
    if ours.shape != (rows, *theirs.shape[1:]) or ours.dtype != theirs.dtype:
        return False
    for shard in theirs.addressable_shards:
        part = ours[shard.index]  # the last shard may have fewer rows, with padding behind them
        if not np.array_equal(part, np.asarray(shard.data)[: len(part)]):
            return False
    return True


def _folders(given: Mapping[str, Any], download: bool | None) -> list[pathlib.Path]:
    """The folder of each checkpoint: argument of ``jspec.load`` -> its value, a folder or a name on the hub."""
    names = []
    for what, path in given.items():
        if not isinstance(path, str | os.PathLike):
            also = f", {', '.join(map(repr, chosen_by_name()))} or None" if what == "draft" else ""
            raise ValueError(f"{what}={path!r}: expected the path of a checkpoint folder{also}")
        folder, name = pathlib.Path(path), str(path)
        if folder.is_file():
            refuse_gguf([name])
            raise ValueError(f"{what}={name!r} is a file: expected the checkpoint folder that it is in")
        if not folder.is_dir() and not is_hub_name(path):
            raise ValueError(
                f"{what}={name!r}: expected a checkpoint folder, or the name of a model on the hub, org/name"
            )
        names.append(name)
    return [pathlib.Path(folder) for folder in local_checkpoints(names, download)]


def _target_folder(head: str, name: str, download: bool | None) -> pathlib.Path:
    """The folder of the target that the draft head in ``head`` names: as it stands, from the head's own folder, or from
    the hub."""
    for folder in (pathlib.Path(name), pathlib.Path(head, name)):
        if folder.is_dir():
            return folder
    if is_hub_name(name):
        try:
            return pathlib.Path(local_checkpoints([name], download)[0])
        except ValueError as reason:
            raise ValueError(f"target={head!r} is a draft head for another checkpoint: {reason}") from None
    raise ValueError(
        f"target={head!r} is a draft head for {name!r}, which is no folder here; download that checkpoint and give "
        f"its folder as target and {head!r} as draft"
    )
