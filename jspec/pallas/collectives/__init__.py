"""Exchanges between the GPUs of one process, in the kernels that need them: sums, and parts that are gathered.

packets.py     8-byte packets that a GPU stores into another one's memory, and waits for in its own
workspace.py   the memory that packets are stored into, and its addresses
mailboxes.py   where in it the packets of an exchange lie; for kernels
words.py       numbers as the 32-bit words that packets carry
access.py      whether the GPUs of a mesh can store into each other's memory
peer_sum.py    a sum over GPUs with the residual sum and the norm behind it, in one launch
peer_parts.py  parts for each GPU, or the same for all, in one launch
peers.py       the exchanges of a program, one after another"""
