"""New weights in the place of those of a model that is loaded, from arrays on its devices.

named.py        which parameter each array fills, by the same maps as the tensors of files
rounding.py     rounds parameters on their device, as those were that they replace
programs.py     the compiled functions that write parameters into the memory of those of before
target.py       the arrays of a target: checked, written, and read from a folder again
draft.py        the module of a draft model or draft head with other weights
replaceable.py  the methods of ``jspec.LLM``
update.py       one update at a time: a mapping, a stream or a folder, and what it does to the engine
"""
