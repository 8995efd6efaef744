"""The scripts that made the checkpoints shipped with jspec.

train.py       trains target and draft model
heads.py       trains the draft heads
corpus.py      the corpus, CPython's standard library
tokenizer.py   the tokenizer
configs.py     dimensions of target and draft model
objectives.py  losses of target and draft model
export.py      writes Hugging Face checkpoints
"""
