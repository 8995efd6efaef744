"""From checkpoint folders to the modules of a target and a draft that are compatible.

pair.py            opens target and draft, checks them and builds their modules
compatibility.py   checks of target, draft and settings against each other
memory_budget.py   bytes that they need on the devices, from shapes alone; the pages and the context length that fit
context_length.py  the context lengths to choose from
activation_dtype.py  the type to which a target rounds the inputs of its maps
kv_cache_dtype.py  the type of cached keys and values, and the scales of those in eight bits
"""
