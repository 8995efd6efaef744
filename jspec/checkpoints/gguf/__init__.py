"""GGUF files, those of llama.cpp: read as the Hugging Face checkpoint that they were made from, with weights as stored.

folder.py          ``GGUFFolder``: a file as the folder of that checkpoint
names.py           what names of files say: quantisation and part
header.py          metadata and places of tensors in one file; everything is bounded, and nothing is executed
architectures.py   the fields of config.json
sources.py         of which tensors of a file each tensor of the checkpoint is made
tensors.py         the tensors, plain ones and quantised ones as they are stored
vocabulary.py      the tokens
tokenizer.py       the tokenizer files of the original; pre_tokenizers.py has how texts are cut, generation.py where they end
"""
