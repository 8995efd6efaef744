"""Draft heads on disk: how a folder's layout is recognised, read and written.

Several projects publish checkpoints of the same drafting method in different layouts: other tensor names, other keys in
config.json. Each public layout has one file here (``eagle``, ``eagle3``, ``speculators``, ``medusa``, ``mlp``,
``language_model``), which ends with a ``HeadFormat`` (``format.py``): a predicate that recognises the layout by its
config.json and tensor names, a function that reads it and, for some, functions that write it.

``kinds.recognise`` takes off what some tools wrap around a checkpoint (``wrapping.py``) and refuses the kinds that
jspec cannot draft with. It then asks each ``HeadFormat`` in the order of ``jspec.registry.METHODS``; the first that
recognises the folder reads it. The last one, a plain language model, accepts every folder. Example: config.json with
``"architectures": ["LlamaForCausalLMEagle3"]`` is recognised by ``eagle3.FORMAT``.

A folder that ``jspec-convert`` wrote is not recognised again: its manifest holds the config of the draft head, which
``stored.py`` writes and reads.
"""
