"""GGUF files, those of llama.cpp: read as the Hugging Face checkpoint that they were made from, with weights as stored.

header.py         metadata and places of tensors in one file; everything is bounded, and nothing is executed
architectures.py  the fields of config.json that the metadata stand for, for each architecture that is read
sources.py        of which tensors of the file each tensor of the checkpoint is made
"""
