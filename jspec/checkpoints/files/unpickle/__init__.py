"""A program that finds where the tensors of a ``torch.save`` file lie, without unpickling the file.

``jspec.checkpoints.files.pickles`` runs it in a process of its own, as the top-level package ``unpickle`` of an
interpreter that sees no other package. So it needs the standard library alone and imports nothing from outside this
folder.

worker.py    limits the process, and writes the answer
archive.py   reads the two file formats of ``torch.save``
machine.py   interprets the pickle inside it
"""
