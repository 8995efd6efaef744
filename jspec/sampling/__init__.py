"""Requests' settings, the distributions of their logits, noise, and the verification rules.

params.py             ``SamplingParams``
requested.py          the params of a call, from an object or from fields by name
structured.py         ``StructuredOutputsParams``
thinking.py           ``ThinkingBudget``
request_keys.py       the random keys of requests
streams.py            the key of every draw
processors.py         changes of logits before the temperature
stops.py              stop tokens on the device
distribution.py       the distribution of logits
draft_vocabulary.py   distributions over a draft vocabulary
verify.py             the verification rules
tree.py               trees of drafts, and the rule that follows a path
candidates.py         the likeliest next tokens, for drafts that branch
confidence.py         a drafter's confidence in its drafts
logprobs.py           log-probabilities of tokens
"""
