"""Reads checkpoints, Hugging Face folders and converted ones, as a config and a flat dict of parameters.

The flat dict maps dotted names to arrays: ``{"layers.0.attention.qkv.weight": array, ...}``.

``checkpoint.Checkpoint`` is the way in. Its attributes are read when they are first asked for. A Hugging Face folder is
read in this order: ``files.folder`` opens the files, ``files.json_files`` and ``files.fields`` read config.json,
``huggingface.weights`` (or ``files.pickles``) reads the names and shapes of the tensors, ``heads.kinds`` recognises the
layout, and ``huggingface.model`` assembles the parameters. A converted folder has a ``converted.manifest`` and the
parameters in an Orbax checkpoint (``converted.orbax``), which ``converted.model`` reads.

checkpoint.py   ``Checkpoint``: a folder of either kind, opened once
params.py       ``StoredParams``: parameters that are read one at a time
unread_keys.py  warns of keys of config.json that nothing looked up
layout.py       ``Layout``: what a Hugging Face folder was recognised as
tokenizer.py    the tokenizer in a folder
export.py       writes draft heads in their public layouts
files/          opens and parses the files of a folder
huggingface/    Hugging Face folders of language models
heads/          the layouts of draft heads
dequantize/     weights with a scale for each block
converted/      folders that ``jspec-convert`` wrote

Everything in a checkpoint is untrusted: none of its code runs, and nothing outside its folder is read.
"""
