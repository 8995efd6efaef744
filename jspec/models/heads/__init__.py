"""Flax (NNX) modules of draft heads; ``jspec.config.heads`` has their configs.

eagle.py              EAGLE and EAGLE-2
eagle3.py             EAGLE-3 and P-EAGLE
medusa.py             Medusa
mlp_speculator.py     MLP speculators
mtp.py                multi-token prediction layers
block.py              block drafters: DFlash, DFlash2, JetSpec, DSpark, Domino, LiLiCorr and XPress
sequential.py         how a draft of theirs depends on those before it: the interface
dflash2.py            the convolutions and the candidate selector of DFlash2
domino.py, lilicorr.py  the recurrence of Domino, the scores of LiLiCorr
refiner.py            the refiner of XPress
assistant.py          assistants of Gemma 4
draft_vocabulary.py   from tokens of a draft vocabulary to the target's, and back"""
