"""Where the tensors of a ``torch.save`` file lie, found in a process of its own and without unpickling it.

Needs the standard library alone, and imports nothing from outside this folder: ``jspec.checkpoints.pickles`` starts it
as the top-level package ``unpickle`` in an interpreter that sees no other package."""
