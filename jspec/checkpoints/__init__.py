"""Reads checkpoints, Hugging Face folders and converted ones, as a config and a flat dict of parameters.

The flat dict maps dotted names to arrays: ``{"layers.0.attention.qkv.weight": array, ...}``.

``checkpoint.Checkpoint`` is the way in. Its attributes are read when they are first asked for. A Hugging Face folder is
read in this order: ``files.folder`` opens the files, ``files.json_files`` and ``files.fields`` read config.json,
``huggingface.weights`` (or ``files.pickles``) reads the names and shapes of the tensors, ``layouts.kinds`` recognises the
layout, and ``huggingface.model`` assembles the parameters. A converted folder has a ``converted.manifest`` and the
parameters in an Orbax checkpoint (``converted.orbax``), which ``converted.model`` reads.

checkpoint.py   ``Checkpoint``: a folder of either kind, opened once
in_memory.py    ``InMemory``: a model of arrays in the place of a folder
tokenizer.py    the tokenizer in a folder
export.py       writes draft heads in their public layouts
files/          opens and parses the files of a folder
tensors/        which tensor fills which parameter, and parameters that are read one at a time
quantized/      weights that are stored quantised: read as they are stored, or dequantised
huggingface/    config.json of language models, and their folders
layouts/        the layouts of draft heads and of language models, and how a folder is recognised
converted/      folders that ``jspec-convert`` wrote

Everything in a checkpoint is untrusted: none of its code runs, and nothing outside its folder is read.
"""
