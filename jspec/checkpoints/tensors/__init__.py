"""Which tensor of a checkpoint fills which parameter.

layout.py            ``Layout``: what a Hugging Face folder was recognised as
names.py             which slice of which parameter each tensor fills
parts.py             tensors in another order, or of several parameters
stacked_experts.py   tensors that hold all experts of a layer, as the params do
split_experts.py     tensors that hold all experts of a layer, where each has names of its own
finite.py            tensors in which no number may be infinite
params.py            ``StoredParams``: parameters that are read one at a time"""
