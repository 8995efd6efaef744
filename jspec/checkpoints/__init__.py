"""Reads checkpoints, Hugging Face folders and converted ones, as a config and a flat dict of parameters.

The flat dict maps dotted names to arrays: ``{"layers.0.attention.qkv.weight": array, ...}``.

A Hugging Face folder is read in this order: ``files.folder`` finds the files, ``files.json_files`` and ``files.fields``
read config.json, ``huggingface.weights`` (or ``files.pickles``) reads the names and shapes of the tensors,
``heads.kinds`` recognises what the folder holds, which gives a ``layout``, and ``huggingface.source`` assembles the
parameters. ``huggingface.config`` and ``huggingface.rope`` read the config of a language model, ``huggingface.names``
says which tensor goes into which parameter. A converted folder has a ``converted.manifest`` and the parameters in an
Orbax checkpoint (``converted.orbax``). ``loading`` reads both kinds of folders, ``export`` writes draft heads.

  loading.py, export.py     folders read, and draft heads written
  layout.py, tokenizer.py   what a folder was recognised as; its tokenizer
  files/                    the files of a folder
  huggingface/              Hugging Face folders of language models
  heads/                    the layouts of draft heads
  dequantize/               weights with a scale for each block
  converted/                folders that ``jspec-convert`` wrote

Everything in a checkpoint is untrusted: none of its code runs, and nothing outside its folder is read.
"""
