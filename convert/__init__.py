"""Converts Hugging Face checkpoints to Flax params: a library and the ``jspec-convert`` command.

report = convert("path/to/hf-folder", "path/to/converted", dtype="bfloat16")
config, params = load_folder("path/to/either")
config, params = load_draft("path/to/a-draft-head")
problems = check("path/to/converted")

cli.py               the ``jspec-convert`` command
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

from convert.compressed import export_quantized
from convert.conversion import Report, convert
from jspec.checkpoints.checkpoint import load_draft, load_folder, read_draft_config, verifier_of
from jspec.checkpoints.converted.manifest import check
from jspec.checkpoints.files.refusal import Mismatch, Refusal

__all__ = [
    "Mismatch",
    "Refusal",
    "Report",
    "check",
    "convert",
    "export_quantized",
    "load_draft",
    "load_folder",
    "read_draft_config",
    "verifier_of",
]
