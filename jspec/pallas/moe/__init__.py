"""Mixtures of experts.

router_reference.py     the definition of routing
router_logits.py        the router's logits
choice.py               in a kernel: the experts of some tokens
router.py               the router for any number of tokens
router_small_batch.py   the router for few tokens, in one launch
tiles.py                tiles of assignments of tokens to experts, and the weights of experts
operands.py             what a tile multiplies in each trip, by the format of the weights
grouped_matmul.py       the matmul of a tile with its expert's weights
activation.py           what is between the two products of an expert
grouped_mlp.py          the MLP of all experts"""
