"""GGUF files, those of llama.cpp: read as the Hugging Face checkpoint that they were made from, with weights as stored.

header.py        metadata and places of tensors in one file; everything is bounded, and nothing is executed
tensors.py       tensors of a file, plain ones and quantised ones as they are stored
"""
