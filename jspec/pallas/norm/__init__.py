"""Normalisation.

rms_norm.py    RMSNorm and LayerNorm, with the residual sum before them
qk_norm.py     norms of each head of queries and keys
gated_norm.py  that of each value head of a gated delta net, times its gate"""
