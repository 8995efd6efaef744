"""Which files of a repository jspec reads: no copies in other formats, no pictures, no code."""

import dataclasses
from collections.abc import Collection, Sequence

from jspec.checkpoints.converted.manifest import NAME as MANIFEST
from jspec.checkpoints.converted.manifest import PARAMS, UNREAD
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.gguf.names import called, holds_gguf_alone, parts_of, tags_of
from jspec.checkpoints.huggingface.older_files import FILES as OLDER_FILES
from jspec.checkpoints.huggingface.weights import INDEX, MEDUSA, PICKLE_INDEX, PICKLE_NAMES, PICKLE_SUFFIXES, SINGLE
from jspec.checkpoints.layouts.block_settings import MASK_EMBEDDING
from jspec.checkpoints.quantized.model_optimizer import FILE as MODEL_OPTIMIZER
from jspec.checkpoints.tokenizer import FILES
from jspec.hub.listing import Listing, RemoteFile
from jspec.hub.names import Repository

CONFIG = "config.json"
NEEDED = (CONFIG, "generation_config.json", *FILES)  # what belongs to a checkpoint, as far as its repository has it
# Beside weights. Of the last two, one says that there is more to the weights than the folder has, and one is refused.
SMALL = (*NEEDED, MODEL_OPTIMIZER, *OLDER_FILES, INDEX, PICKLE_INDEX, "adapter_config.json", MASK_EMBEDDING)
_OTHER_COPIES = ("consolidated", "adapter_model")  # how names of safetensors files begin that config.json is not about


def first_files(listing: Listing, allow_pickle: bool = False) -> list[RemoteFile]:
    """What is read beside the weights, the index of the weights too. Of a converted folder, all files; of GGUF, which say
    all by themselves, the parts of the one that is meant.

    Args:
      listing: the files of the repository.
      allow_pickle: whether pickled weights will be read if there are no others.

    Raises:
      Refusal: the repository has no checkpoint that could be read; nothing needs to be downloaded to say so.
    """
    repository, files = listing.repository, {file.name: file for file in listing.files}
    names = list(files)
    if repository.file is not None:
        parts = gguf_of(repository, names)
        if (absent := next((part for part in parts if part not in files), None)) is not None:
            raise Refusal(f"{repository}: lists no file {absent!r}, a part of the model; its upload may be unfinished")
        return [files[part] for part in parts]
    if _is_converted(listing):
        unread = (*UNREAD, ".")
        return [file for file in listing.files if "/" in file.name or not file.name.startswith(unread)]
    if holds_gguf_alone(names):
        raise Refusal(which_gguf(repository, names))
    if listing.named(CONFIG) is None:
        also = f"; {which_gguf(repository, names)}" if tags_of(names) else ""
        raise Refusal(f"{repository}: holds no {CONFIG}, so it is no checkpoint that jspec reads{also}")
    kept = _weights(listing, allow_pickle)  # raises where there are none
    left_out = PICKLE_INDEX if any(file.name.endswith(".safetensors") for file in kept) else INDEX
    if listing.named(SINGLE) is not None:
        left_out = (INDEX, PICKLE_INDEX)
    return [file for file in listing.files if file.name in SMALL and file.name not in left_out]


def weight_files(listing: Listing, allow_pickle: bool = False) -> list[RemoteFile]:
    """The weights that ``first_files`` leaves out, of shards the most that they can be: the index may name fewer."""
    is_first = listing.repository.file is not None or _is_converted(listing)
    return [] if is_first else _weights(listing, allow_pickle)


def gguf_of(repository: Repository, names: Sequence[str]) -> list[str]:
    """The names, among ``names``, of the parts of the GGUF file that a repository was asked for, the first one first.

    Raises:
      Refusal: none is called so, or several are.
    """
    models = called(names, repository.file or "")
    if not models:
        whole = dataclasses.replace(repository, file=None)
        raise Refusal(f"{repository}: no GGUF file is called so; {which_gguf(whole, names)}")
    if len(models) > 1:
        raise Refusal(
            f"{repository}: {len(models)} GGUF files are called so; give the name of one: {', '.join(models)}"
        )
    return parts_of(models[0])


def which_gguf(repository: Repository, names: Sequence[str]) -> str:
    """One sentence on the GGUF files among ``names``, for somebody who has not chosen one."""
    tags = tags_of(names)
    if not tags:
        return f"{repository} holds no GGUF file of a language model"
    listed = ", ".join(tags)
    return f"{repository} holds GGUF files: give one behind a colon, as {repository}:{tags[0]}; there are {listed}"


def shards_in_use(listing: Listing, weights: Sequence[RemoteFile], folder: Folder) -> list[RemoteFile]:
    """Those of ``weights`` that the index in ``folder`` names, or all where there is no index.

    Raises:
      Refusal: the index names a file that the repository does not list.
    """
    index = next((name for name in (INDEX, PICKLE_INDEX) if folder.has(name)), None)
    names = {file.name for file in weights}
    if index is None or names & {SINGLE, MEDUSA}:
        return list(weights)
    used = shard_names(folder, index)
    absent = sorted(used - names)
    if absent:
        raise Refusal(
            f"{listing.repository}: {index} names {absent[0]!r}, which the repository does not list; its upload may be "
            "unfinished: try later, or give an earlier commit behind @"
        )
    return [file for file in weights if file.name in used]


def shard_names(folder: Folder, index: str) -> set[str]:
    """The names of the shards in an index. What is wrong with an index is said when it is loaded."""
    shards = folder.json(index).get("weight_map")
    return {name for name in shards.values() if isinstance(name, str)} if isinstance(shards, dict) else set()


def pickles_among(names: Collection[str]) -> list[str]:
    """The names of files that may be pickled weights, known names first."""
    known = [name for name in PICKLE_NAMES if name in names]
    return known or sorted(name for name in names if name.endswith(PICKLE_SUFFIXES) and name != MASK_EMBEDDING)


def _weights(listing: Listing, allow_pickle: bool) -> list[RemoteFile]:
    here = {file.name: file for file in listing.files if "/" not in file.name}
    if SINGLE in here:
        return [here[SINGLE]]
    if INDEX in here:
        shards = [name for name in here if name.endswith(".safetensors") and not name.startswith(_OTHER_COPIES)]
        return [here[name] for name in shards]
    if MEDUSA in here:
        return [here[MEDUSA]]
    pickles = pickles_among(here)
    if not pickles:
        raise Refusal(
            f"{listing.repository}: holds neither {SINGLE} nor {INDEX}, so it has no weights that jspec reads"
        )
    if not allow_pickle:
        raise Refusal(
            f"{listing.repository}: holds pickled weights alone ({pickles[0]}), which are refused, because loading them can "
            "run code; convert them with jspec-convert --allow-pickle --download, which reads tensors alone"
        )
    if PICKLE_INDEX in pickles:
        return [here[name] for name in here if name.endswith(".bin")]
    return [here[name] for name in pickles]


def _is_converted(listing: Listing) -> bool:
    return listing.named(MANIFEST) is not None and any(file.name.startswith(f"{PARAMS}/") for file in listing.files)
