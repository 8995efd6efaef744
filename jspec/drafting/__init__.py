"""The drafters, which propose tokens, one file for each.

base.py          the protocol of a drafter, and its inputs
methods.py       builds the drafter of a method
drawing.py       draws draft tokens from logits, and chains passes
window.py        the cache slots that the first pass of a round reads
draft_model.py   a smaller language model
recurrent.py     recurrent states of such a model, and how they forget rejected drafts
eagle.py         EAGLE, EAGLE-2 and EAGLE-3 heads
mtp.py           multi-token prediction layers
parallel.py      P-EAGLE heads and PARD models: K drafts in one pass
block.py         DFlash, DFlash2, JetSpec, DSpark, Domino, LiLiCorr, XPress: a block of slots in one pass
tree.py          trees of drafts, of EAGLE heads and block drafters
assistant.py     assistants of Gemma 4: queries over the target's own keys and values
medusa.py        Medusa heads
mlp.py           MLP speculators
ngram.py         prompt lookup in the text
corpus.py        prompt lookup in a corpus
lookup.py        prompt lookup beside another drafter
plain.py         no drafts
"""
