"""``export_draft`` writes a draft head as a checkpoint in the public layout of its method."""

from jspec.checkpoints.export import export_draft as export_draft
