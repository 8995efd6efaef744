"""From checkpoint folders to a target and a draft that fit together."""

import dataclasses
import os
import pathlib
import re
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec._arguments import require
from jspec.checkpoints.heads.options import HeadOptions
from jspec.checkpoints.loading import load_draft, read_generation_config, verifier_of
from jspec.checkpoints.tokenizer import load_tokenizer
from jspec.config import MAX_POSITIONS, ModelConfig, Speculation
from jspec.heads import DraftConfig, Eagle3Config, EagleConfig, HeadConfig
from jspec.models import Decoder, build, build_head
from jspec.registry import DraftMethod, chosen_by_name, entry_of, particular_options, resolve
from jspec.sampling.params import SamplingParams
from jspec.text import Tokenizer

Path = str | pathlib.Path
ADOPTED = ("temperature", "top_k", "top_p", "min_p")  # of a checkpoint's generation_config.json
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def find_folders(target: Path, draft: Path | None) -> tuple[pathlib.Path, pathlib.Path | None]:
    """The folders of a target and of its draft. A head in the speculators format, given alone, names its target."""
    folder = _folder("target", target)
    if draft is not None:
        return folder, None if draft in chosen_by_name() else _folder("draft", draft)
    verifier = verifier_of(folder)
    return (folder, None) if verifier is None else (_verifier(folder, verifier), folder)


def check_options(draft: DraftConfig | str, speculation: Speculation):
    """Refuse an option of ``speculation`` that what drafts has no use for."""
    method, default = entry_of(draft), Speculation()
    for option in sorted(particular_options() - set(method.options)):
        value = getattr(speculation, option)
        if value != getattr(default, option):
            raise ValueError(
                f"{option}={value!r} has no place with the drafting method {method.name!r}, {method.help}; leave it out"
            )


def prepared(
    method: DraftMethod, arguments: Mapping[str, Any], tokenizer: Tokenizer | None, target: ModelConfig
) -> Any:
    """The arrays that the drafter of a method without a checkpoint reads; None if it reads none."""
    if method.prepare is None or method.argument is None:
        return None
    return resolve(method.prepare)(arguments[method.argument], tokenizer, target)


def default_params(target: pathlib.Path, generation_config: str) -> SamplingParams:
    """What arguments of ``generate`` default to.

    The temperature, top_k, top_p and min_p in the checkpoint's ``generation_config.json``, as vLLM takes them; what else
    is in there, ``do_sample`` for one, is not looked at. A repetition penalty is, to warn that it is not followed.

    Args:
      target: the checkpoint folder.
      generation_config: ``auto`` reads that file, ``jspec`` does not.

    Raises:
      ValueError: ``generation_config`` is neither, or the file holds a value that cannot be used.
    """
    known = ("auto", "jspec")
    ok = isinstance(generation_config, str) and generation_config in known
    require(ok, "generation_config", generation_config, "'auto', the checkpoint's own defaults, or 'jspec', jspec's")
    if generation_config == "jspec":
        return SamplingParams()
    fields = read_generation_config(target)
    given = {name: fields.raw[name] for name in ADOPTED if fields.raw.get(name) is not None}
    try:
        params = SamplingParams(**given)
    except ValueError as error:
        raise ValueError(f"{fields.where}: {error}; correct it, or load with generation_config='jspec'") from None
    penalty = fields.number("repetition_penalty", 1.0)
    if penalty != 1:
        warnings.warn(
            f"{fields.where}: repetition_penalty={penalty:g} is not followed, because penalties are not supported yet; "
            "generation_config='jspec' leaves the whole file aside",
            stacklevel=3,
        )
    return params


def within_reach(speculation: Speculation, draft: ModelConfig | HeadConfig) -> Speculation:
    """``speculation`` with no more drafts than there are weights for; warns if it cuts, or if fewer were trained."""
    K, field = speculation.most_draft_tokens, "max_draft_tokens" if speculation.auto else "num_draft_tokens"
    asked = not speculation.auto or speculation.max_draft_tokens is not None
    if draft.max_drafts is not None and draft.max_drafts < K:
        if asked:
            warnings.warn(
                f"{field}={K}: the {draft.method} checkpoint has weights for {draft.max_drafts}, so a round drafts "
                f"{draft.max_drafts}",
                stacklevel=3,
            )
        return dataclasses.replace(speculation, **{field: draft.max_drafts})
    if asked and draft.trained_drafts is not None and draft.trained_drafts < K:
        warnings.warn(
            f"{field}={K}: the {draft.method} head was trained to draft {draft.trained_drafts}; later drafts "
            "may be accepted rarely",
            stacklevel=3,
        )
    return speculation


def with_positions(target: ModelConfig, draft: ModelConfig | HeadConfig, max_len: int) -> ModelConfig | HeadConfig:
    """``draft`` with the positions that it can draft at; warns if they are fewer than ``max_len``.

    A head shares the positions of its target, whatever its config.json says: many were trained on texts of 2048 tokens and
    say so, and their authors and vLLM draft on beyond, because their rotary embedding is a formula that has no end. With
    ``yarn`` it ends at the length that it was stretched to, with ``dynamic`` at ``max_position``. Language models keep their
    own limit: beyond it they have never drafted anything, and every pass of one costs more than a head's.
    """
    if not isinstance(draft, EagleConfig | Eagle3Config):
        has = draft.decoder
        limit = max_len if has is None else has.max_position
    else:
        layers = draft.layers
        limit = max(layers.max_position, min(_end_of_rope(layers), target.max_position))
        draft = dataclasses.replace(draft, layers=dataclasses.replace(layers, max_position=limit))
    if limit < max_len:
        warnings.warn(
            f"the {draft.method} checkpoint has {limit} positions, and max_len={max_len}: nothing is drafted after "
            "longer texts",
            stacklevel=3,
        )
    return draft


def _end_of_rope(layers: ModelConfig) -> int:
    """Positions that the rotary embedding has a meaning for."""
    rope = layers.rope
    if rope.kind == "yarn":
        return int(rope.factor * rope.original_max_position)
    return layers.max_position if rope.kind == "dynamic" else MAX_POSITIONS


def check_fit(
    target: ModelConfig, draft: ModelConfig | HeadConfig, tokenizer: Tokenizer | None, draft_path: pathlib.Path
):
    """Refuse a head of another target, or a language model that reads tokens differently.

    Args:
      target, draft: their configurations.
      tokenizer: the target's, None if its checkpoint has none.
      draft_path: where the draft's tokenizer may be; a head needs none, so that one beside it is not opened.
    """
    draft.require_fit(target)
    if draft.language_model is not None:
        _check_pair(target, draft.language_model, tokenizer, load_tokenizer(draft_path))


def load_draft_module(
    path: pathlib.Path, dtype: str, options: HeadOptions, config: ModelConfig | HeadConfig, target: Decoder
):
    """(config, module) of what drafts, ready to serve; ``config`` is what the checkpoint was read as."""
    _, params = load_draft(path, dtype, **dataclasses.asdict(options))
    return build_draft_module(config, params, dtype, target)


def build_draft_module(config: ModelConfig | HeadConfig, params: dict, dtype: str, target: Decoder):
    """(config, module) of what drafts, ready to serve.

    A head that has the target's embedding or output head over again borrows them instead; they leave ``params``.
    """
    if config.language_model is not None:
        return config, build(config.language_model, params, dtype)
    config = _borrow(config, params, target)
    return config, build_head(config, params, dtype).prepare()


def _borrow(config: HeadConfig, params: dict, target: Decoder) -> HeadConfig:
    """``config`` without the copies that ``params`` holds of the target's weights; they are taken out of ``params``.

    What the target has quantised is no copy of a head's weight, which stays.
    """
    lent = {
        "own_embedding": None if target.embedding_scale is not None else target.embedding[...],
        "own_head": None if target.output_scale is not None else target.output_weight,
    }
    for field, name in config.borrowable:
        if getattr(config, field) and lent[field] is not None and _same(params[name], lent[field]):
            del params[name]
            config = dataclasses.replace(config, **{field: False})  # pyright: ignore[reportArgumentType]
    return config


def _same(ours, theirs) -> bool:
    return ours.shape == theirs.shape and np.array_equal(ours, np.asarray(theirs))


def _folder(what: str, path: Path) -> pathlib.Path:
    if not isinstance(path, str | os.PathLike):
        also = ", 'ngram' or None" if what == "draft" else ""
        raise ValueError(f"{what}={path!r}: expected the path of a checkpoint folder{also}")
    folder, name = pathlib.Path(path), str(path)
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise ValueError(f"{what}={name!r} is a file: expected the checkpoint folder that it is in")
    hint = ""
    if HUB_NAME.fullmatch(name):
        hint = (
            "; jspec reads local folders, so if this is a name on the Hugging Face hub, download it with "
            f"'hf download {name} --local-dir {folder.name}' and give the folder {folder.name!r}"
        )
    raise ValueError(f"{what}={name!r}: expected a checkpoint folder{hint}")


def _verifier(head: pathlib.Path, name: str) -> pathlib.Path:
    """The folder of the target that a head names: as it stands, or from the head's own folder."""
    for folder in (pathlib.Path(name), head / name):
        if folder.is_dir():
            return folder
    raise ValueError(
        f"target={str(head)!r} is a draft head for {name!r}, which is no folder here; download that checkpoint and give "
        f"its folder as target and {str(head)!r} as draft"
    )


def _check_pair(target: ModelConfig, draft: ModelConfig, tokenizer: Tokenizer | None, other: Tokenizer | None):
    """Refuse a draft model that reads tokens differently. Vocabularies padded to different sizes are fine."""
    if tokenizer is None or other is None:
        if target.vocab_size != draft.vocab_size:
            raise ValueError(
                f"draft has a vocabulary of {draft.vocab_size} and the target of {target.vocab_size}, and without both "
                "tokenizers nothing shows that they agree; expected equal sizes"
            )
        return
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    for token, index in ours.items():
        if theirs.get(token, None if index < len(theirs) else index) != index:
            raise ValueError(
                f"draft's tokenizer differs from the target's: token {token!r} is {index} for the target and "
                f"{theirs.get(token)} for the draft; expected a draft model with the target's tokenizer"
            )
