"""Hugging Face folders: config.json, and which tensor goes into which parameter.

config.py                from config.json to a ``ModelConfig``
families.py              the families of language models, one entry for each transformers class
family_keys.py           keys of config.json that only some families have
rope.py, windows.py      rotary embeddings and attention windows
multimodal.py            the text model inside a multimodal checkpoint
quantization_config.py   weights that are quantised already
quantization_fields.py   what readers of a ``quantization_config`` share
names.py                 which slice of which parameter each tensor fills
parts.py                 tensors in another order, or of several parameters
stacked_experts.py       tensors that hold all experts of a layer
scales.py                weights of eight bits and their scales
weights.py               the files of weights
source.py                an open folder, from which parameters are assembled
"""
