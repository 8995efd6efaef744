"""Folders that ``jspec-convert`` wrote.

manifest.py    what a folder was made from, and a digest of every file
orbax.py       its Orbax checkpoint
params.py      the params of a checkpoint folder, one at a time
quantized.py   shapes and dtypes of parameters that may be quantised
"""
