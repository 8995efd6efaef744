"""``export_draft``: params as a checkpoint in the public layout of their method, the inverse of ``load_draft``."""

from jspec.checkpoints.export import export_draft as export_draft
