"""Layouts of draft heads and language models on disk: how a folder is recognised, read and written.

Several projects publish checkpoints of the same drafting method in different layouts: other tensor names, other keys in
config.json. Each public layout has one file here, which ends with a ``CheckpointFormat``: a predicate that recognises the
layout by its config.json and tensor names, a function that reads it and, for some, functions that write it.

``kinds.recognise`` puts dequantised weights in place of what a head stores in FP8 or four bits (``quantized.py``), removes
prefixes and outer configs that some tools add (``wrapping.py``) and refuses the kinds that jspec cannot draft with. It then
asks each ``CheckpointFormat`` in the order of ``jspec.registry.METHODS``; the first that recognises the folder reads it.
The last one, a plain language model, accepts every folder. Example: config.json with
``"architectures": ["LlamaForCausalLMEagle3"]`` is recognised by ``eagle3.FORMAT``. Weights of heads with
decoder layers stay as they are stored in the end, where there is a kernel for them.

A folder that ``jspec-convert`` wrote is not recognised again: its manifest holds the config of the draft head.

kinds.py               recognises what a folder holds
format.py              ``CheckpointFormat``: a public layout
options.py             ``HeadOptions``: settings that checkpoints leave open
published.py           what is known of published heads whose checkpoints leave them open
quantized.py           heads whose weights are stored in eight or four bits
wrapping.py            prefixes and outer configs around EAGLE heads
eagle.py               EAGLE in SafeAILab's layout
eagle3.py              EAGLE-3 and P-EAGLE in the native layouts
eagle3_settings.py     where their config.json has settings, and what ``norm_output`` means
speculators.py         EAGLE, EAGLE-3 and P-EAGLE in the speculators format
block.py               block drafters (DFlash, DFlash2, JetSpec, DSpark) in the native layouts
block_dflash2.py       what DFlash2 heads have besides
block_corrections.py   what Domino and LiLiCorr heads have besides
block_settings.py      their settings in config.json
block_speculators.py   block drafters in the speculators format
assistant.py           assistants of Gemma 4
mtp.py                 multi-token prediction layers
mtp_speculators.py     such a layer in the speculators format
medusa.py              Medusa heads
mlp.py                 MLP speculators
language_model.py      language models as draft models, PARD models among them
layers.py              the config of a head's decoder layers
aux_layers.py          which auxiliary hidden states a head reads
vocabulary.py          reduced vocabularies: ``d2t``, ``t2d`` and ``draft_ids``
stored.py              a head's config as JSON in a manifest
"""
