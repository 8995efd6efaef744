"""Converts Hugging Face checkpoints to Flax params: a library and the ``jspec-convert`` command.

report = convert("path/to/hf-folder", "path/to/converted", dtype="bfloat16")
config, params = load_folder("path/to/either")
config, params = load_draft("path/to/a-draft-head")
problems = check("path/to/converted")
"""

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
    "load_draft",
    "load_folder",
    "read_draft_config",
    "verifier_of",
]
