"""Normalisation.

rms_norm.py   RMSNorm and LayerNorm, with the residual sum before them
qk_norm.py    norms of each head of queries and keys"""
