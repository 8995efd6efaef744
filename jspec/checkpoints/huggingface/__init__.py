"""Hugging Face folders: config.json, and which tensor goes into which parameter.

model.py                 ``HuggingFaceModel``: what a folder holds, from which params are assembled
config.py                from config.json to a ``ModelConfig``
families/                the families of language models, one entry for each transformers class
rope.py                  rotary embeddings
windows.py               attention windows
multimodal.py            the text model inside a multimodal checkpoint
unread_classes.py        classes that are not read, and why
quantization_config.py   how stored weights are quantised, by config.json
model_optimizer.py       the same of checkpoints of NVIDIA Model Optimizer
older_files.py           the same of checkpoints of 2023, whose config.json does not say it
stored_quantization.py   ``StoredQuantization``: FP8 weights that are kept as they are stored
quantization_fields.py   checks and lists of modules that readers of a ``quantization_config`` share
names.py                 which slice of which parameter each tensor fills
parts.py                 tensors in another order, or of several parameters
stacked_experts.py       tensors that hold all experts of a layer, as the params do
split_experts.py         tensors that hold all experts of a layer, where each has names of its own
scales.py                weights of eight bits and their scales
cache_scheme.py          what a checkpoint says of a cache in eight bits, and its scales
kept_weights.py          weights that are kept as they are stored, where the tensors say which
kept_codes.py            codes of four and eight bits as jspec stores them, read from a checkpoint
finite.py                tensors in which no number may be infinite
weights.py               the headers and the tensors of weight files
"""
