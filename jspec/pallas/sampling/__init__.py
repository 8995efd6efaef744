"""Sampling from logits.

sample.py          temperature, cutoff, log-normaliser, and one draw from every distribution
top_k_top_p.py     top-k, top-p and min-p as one threshold, found without a sort
gumbel_max.py      a token by two Gumbel draws
threefry.py        random bits from counters
residual.py        what follows a rejected draft: the mass of max(w p - q, 0), and a draw from it
warped_logits.py   distributions that are stored as logits and three numbers
"""
