"""From checkpoint folders to the modules of a target and a draft that fit together.

pair.py            opens both folders, and builds both models
compatibility.py   whether target, draft and settings fit together
memory_budget.py   whether they fit on the devices, from shapes alone
"""
