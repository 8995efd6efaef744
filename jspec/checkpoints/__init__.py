"""Reads checkpoints, Hugging Face folders and converted ones, as a config and a flat dict of parameters.

The flat dict maps dotted names to arrays: ``{"layers.0.attention.qkv.weight": array, ...}``.

A Hugging Face folder is read in this order: ``folder`` finds the files, ``json_files`` and ``fields`` read config.json,
``weights`` (or ``pickles``) reads the names and shapes of the tensors, ``heads.kinds`` recognises what the folder holds,
which gives a ``layout``, and ``source`` assembles the parameters. ``hf_config`` and ``hf_rope`` read the config of a
language model, ``names`` says which tensor goes into which parameter. A converted folder has a ``manifest`` and the
parameters in an Orbax checkpoint (``orbax``). ``loading`` reads both kinds of folders, ``export`` writes draft heads.

Everything in a checkpoint is untrusted: none of its code runs, and nothing outside its folder is read.
"""
