"""Reading checkpoints, Hugging Face folders and converted ones, as a config and a flat dict of parameters.

Everything that a checkpoint says is untrusted: no code of it runs, and nothing outside its folder is read.
"""
