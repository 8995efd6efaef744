"""Engines with several devices, of one process or of more.

shard_map.py              programs over several devices (``jax.shard_map``)
batch_sharded_verify.py   each device verifies some rows of the batch, so that none has all logits
leader.py                 process 0, which broadcasts what to run
follower.py               every other process, which replays it
"""
