"""Converts Hugging Face checkpoints to Flax params: a library and the ``jspec-convert`` command.

report = convert("path/to/hf-folder", "path/to/converted", dtype="bfloat16")
config, params = load_folder("path/to/either")
config, params = load_draft("path/to/a-draft-head")
problems = check("path/to/converted")

cli.py               the ``jspec-convert`` command; choices.py: what its options may be
conversion.py        ``convert``
preparation.py       what is converted: fit, draft vocabulary, quantisation, layers beside a model
write.py             the files of a converted folder
checkpoint.py        writes parameters as an Orbax checkpoint
chunks.py            chunk shapes of stored arrays
manifest.py          writes the manifest
staging.py           atomic creation of a folder
listing.py           the text of ``--dry-run``
quantize.py          quantises parameters
draft_vocabulary.py  chooses the tokens of a reduced vocabulary
reduce.py            reduces a drafter to them
export.py            draft heads in their public layouts
compressed.py        quantised language models in the formats of compressed-tensors
verify.py            compares a converted folder with its source
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convert.compressed import export_quantized as export_quantized
    from convert.conversion import Report as Report
    from convert.conversion import convert as convert
    from jspec.checkpoints.checkpoint import load_draft as load_draft
    from jspec.checkpoints.checkpoint import load_folder as load_folder
    from jspec.checkpoints.checkpoint import read_draft_config as read_draft_config
    from jspec.checkpoints.checkpoint import verifier_of as verifier_of
    from jspec.checkpoints.converted.manifest import check as check
    from jspec.checkpoints.files.refusal import Mismatch as Mismatch
    from jspec.checkpoints.files.refusal import Refusal as Refusal

# Public name -> the module that defines it. As in ``jspec``, a name is imported when it is first used (PEP 562), so that the
# command answers, and can be interrupted, before it loads JAX.
_PUBLIC = {
    "Mismatch": "jspec.checkpoints.files.refusal",
    "Refusal": "jspec.checkpoints.files.refusal",
    "Report": "convert.conversion",
    "check": "jspec.checkpoints.converted.manifest",
    "convert": "convert.conversion",
    "export_quantized": "convert.compressed",
    "load_draft": "jspec.checkpoints.checkpoint",
    "load_folder": "jspec.checkpoints.checkpoint",
    "read_draft_config": "jspec.checkpoints.checkpoint",
    "verifier_of": "jspec.checkpoints.checkpoint",
}

__all__ = [*_PUBLIC]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'convert' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
