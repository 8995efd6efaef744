"""From checkpoint folders to the modules of a target and a draft that are compatible.

options.py           what a call of ``jspec.load`` asks for
devices.py           the devices that a call of ``jspec.load`` names
pair.py              opens target and draft
plan.py              everything but the weights, read and checked: configs, settings, shards, pages, costs
engine_config.py     the settings of an engine that a caller leaves open
kv_cache_dtype.py    the type of cached keys and values, and the scales of those in eight bits
activation_dtype.py  the type to which a target rounds the inputs of its maps
compatibility.py     checks of target, draft and settings against each other
memory_budget.py     bytes that they need on the devices, from shapes alone; the pages and the context length that fit
modules.py           the modules of both, from their weights
"""
