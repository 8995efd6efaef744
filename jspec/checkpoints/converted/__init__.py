"""Folders that ``jspec-convert`` wrote.

model.py       ``ConvertedModel``: config and params in such a folder
manifest.py    what a folder was made from, and the size and SHA-256 of every file
cache.py       what it says of a cache in eight bits, and the scales of that
orbax.py       the arrays of its Orbax checkpoint
quantized.py   shapes and dtypes of params, of which some may be quantised
"""
