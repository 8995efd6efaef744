"""Hugging Face folders of language models: config.json, and the model that it describes.

model.py            ``HuggingFaceModel``: what a folder holds, from which params are assembled
config.py           from config.json to a ``ModelConfig``
families/           the families of language models, one entry for each transformers class
rope.py             rotary embeddings
windows.py          attention windows
multimodal.py       the text model inside a multimodal checkpoint
unread_classes.py   classes that are not read, and why
older_files.py      quantised checkpoints of 2023, whose config.json does not say so
unread_keys.py      warns of keys of config.json that nothing looked up
weights.py          the headers and the tensors of weight files
"""
