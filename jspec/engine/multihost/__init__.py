"""Engines with several devices, of one process or of more.

batch_sharded_verify.py   each device verifies some rows of the batch, so that none has all logits
leader.py                 process 0, which broadcasts what to run, and the connections of the others to it
"""
