"""Sampling from logits.

sample.py          temperature, cutoff, log-normaliser, and a token of every distribution
top_k_top_p.py     top-k, top-p and min-p as one cutoff, found without a sort
gumbel_max.py      the Gumbel-max trick, first over groups of tokens and then within one
threefry.py        random bits from counters
candidates.py      the tokens that are closest to being sampled, for drafts that branch
residual.py        the residual max(w p - q, 0) after a rejected draft: its mass, and a token of it
warped_logits.py   distributions stored as logits and three numbers"""
