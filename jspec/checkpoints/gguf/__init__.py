"""GGUF files, those of llama.cpp: read as the Hugging Face checkpoint that they were made from, with weights as stored.

header.py        metadata and places of tensors in one file; everything is bounded, and nothing is executed
vocabulary.py    the tokens
tokenizer.py     the tokenizer files of the original; pre_tokenizers.py has how texts are cut, generation.py where they end
"""
