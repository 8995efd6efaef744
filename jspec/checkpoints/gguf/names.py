"""What names of GGUF files say: the quantisation, which part of a split file one is, and whether it has a language model."""

import collections
import posixpath
import re
from collections.abc import Collection, Sequence

from jspec.checkpoints.huggingface.weights import PICKLE_NAMES

SUFFIX = ".gguf"
# Encoders of images and sounds, statistics of a quantisation, and parts of split files but the first.
_OTHERS = re.compile(r"mmproj|imatrix\.gguf$|-(?!00001)\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
_TAG = re.compile(r"(?:.*?[-.])??((?:UD-)?(?:I?Q|TQ|MXFP|NVFP|BF|FP?)\d\w*)", re.IGNORECASE)


def is_gguf(name: str) -> bool:
    return name.lower().endswith(SUFFIX)


def holds_gguf_alone(names: Collection[str]) -> bool:
    """Whether a folder of files with these names has weights in GGUF, and no others."""
    others = (name for name in names if name.endswith(".safetensors") or name in PICKLE_NAMES)
    return any(map(is_gguf, names)) and next(others, None) is None


def language_models(names: Sequence[str]) -> list[str]:
    """The names of GGUF files with a language model, in order; of split files, the first part."""
    return sorted(name for name in names if is_gguf(name) and _OTHERS.search(name) is None)


def parts_of(name: str) -> list[str]:
    """The names of all parts of a split file, by that of one of them; ``name`` alone for another file."""
    found = _PART.fullmatch(name)
    if found is None or int(found[3]) == 0:
        return [name]
    return [f"{found[1]}-{number:05d}-of-{found[3]}{found[4]}" for number in range(1, int(found[3]) + 1)]


def tag_of(name: str) -> str:
    """The quantisation in a file's name, ``Q4_K_M`` or ``UD-Q4_K_XL``, or else in that of its folder; or else ``name``.

    It is what stands at the end, behind ``-`` or ``.``."""
    found = _PART.fullmatch(name)
    stem = name[: -len(SUFFIX)] if found is None else found[1]
    places = filter(None, map(_TAG.fullmatch, (posixpath.basename(stem), posixpath.basename(posixpath.dirname(name)))))
    return next((place[1] for place in places), name)


def called(names: Sequence[str], tag: str) -> list[str]:
    """Those of ``language_models`` that a tag means: a quantisation, in any case, or the name of a file.

    The name of a file goes before a quantisation."""
    models = language_models(names)
    named = [tag] if tag in models else [name for name in models if posixpath.basename(name) == tag]
    return named or [name for name in models if tag_of(name).casefold() == tag.casefold()]


def tags_of(names: Sequence[str]) -> list[str]:
    """By which tag each language model can be asked for: its quantisation, or the name of the file if several have that."""
    models = language_models(names)
    count = collections.Counter(tag_of(name).casefold() for name in models)
    return sorted(tag if count[(tag := tag_of(name)).casefold()] == 1 else name for name in models)
