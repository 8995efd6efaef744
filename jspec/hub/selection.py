"""Which files of a repository jspec reads: no copies in other formats, no pictures, no code."""

from collections.abc import Collection, Sequence

from jspec.checkpoints.converted.manifest import NAME as MANIFEST
from jspec.checkpoints.converted.manifest import PARAMS, UNREAD
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.huggingface.older_files import FILES as OLDER_FILES
from jspec.checkpoints.huggingface.weights import INDEX, MEDUSA, PICKLE_INDEX, PICKLE_NAMES, PICKLE_SUFFIXES, SINGLE
from jspec.checkpoints.layouts.block_settings import MASK_EMBEDDING
from jspec.checkpoints.quantized.model_optimizer import FILE as MODEL_OPTIMIZER
from jspec.checkpoints.tokenizer import FILES
from jspec.hub.listing import Listing, RemoteFile

CONFIG = "config.json"
NEEDED = (CONFIG, "generation_config.json", *FILES)  # what belongs to a checkpoint, as far as its repository has it
# Beside weights. Of the last two, one says that there is more to the weights than the folder has, and one is refused.
SMALL = (*NEEDED, MODEL_OPTIMIZER, *OLDER_FILES, INDEX, PICKLE_INDEX, "adapter_config.json", MASK_EMBEDDING)
_OTHER_COPIES = ("consolidated", "adapter_model")  # how names of safetensors files begin that config.json is not about


def first_files(listing: Listing, allow_pickle: bool = False) -> list[RemoteFile]:
    """What is read beside the weights, the index of the weights too. Of a converted folder, all files.

    Args:
      listing: the files of the repository.
      allow_pickle: whether pickled weights will be read if there are no others.

    Raises:
      Refusal: the repository has no checkpoint that could be read; nothing needs to be downloaded to say so.
    """
    repository = listing.repository
    if _is_converted(listing):
        unread = (*UNREAD, ".")
        return [file for file in listing.files if "/" in file.name or not file.name.startswith(unread)]
    if listing.named(CONFIG) is None:
        also = "; jspec reads no GGUF, so give the repository that it was made from"
        gguf = any(file.name.endswith(".gguf") for file in listing.files)
        raise Refusal(f"{repository}: holds no {CONFIG}, so it is no checkpoint that jspec reads{also * gguf}")
    kept = _weights(listing, allow_pickle)  # raises where there are none
    left_out = PICKLE_INDEX if any(file.name.endswith(".safetensors") for file in kept) else INDEX
    if listing.named(SINGLE) is not None:
        left_out = (INDEX, PICKLE_INDEX)
    return [file for file in listing.files if file.name in SMALL and file.name not in left_out]


def weight_files(listing: Listing, allow_pickle: bool = False) -> list[RemoteFile]:
    """The weights, of shards the most that they can be: the index may name fewer. () of a converted folder."""
    return [] if _is_converted(listing) else _weights(listing, allow_pickle)


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
