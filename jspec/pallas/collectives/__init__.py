"""Sums over the GPUs of one process, in the kernels that use them.

packets.py    8-byte packets that a GPU stores into another one's memory, and waits for in its own
workspace.py  the memory that packets are stored into, and its addresses
peer_sum.py   a sum over GPUs with the residual sum and the norm behind it, in one launch"""
