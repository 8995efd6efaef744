"""Attention over a paged KV cache, and the rotary embedding.

spec.py                the arguments that all attention functions share
reference.py           the definition of attention and of RoPE
table.py               which of these kernels computes attention
paged.py               attention of few query tokens, with split-KV
decode.py              RoPE, KV writes and attention in one launch
prefill_sm90.py        attention of many query tokens on Hopper GPUs
prefill_launch.py      its blocks of queries and tiles of cache slots
prefill_memory.py      its shared memory
prefill_warpgroups.py  what each of its warpgroups does
fp8.py                 keys and values in eight bits
widened.py             attention of many query tokens over these on Hopper GPUs
pages_in_use.py        the pages of a prefill batch
flash.py               the slots of a program instance, and the launch of paged.py and decode.py
softmax.py             the running softmax, and the one order in which its sums are added up
parts.py               the parts of a row, and how program instances share them
tiling.py              sizes of tiles and blocks, and splits of a row
merge_splits.py        merges the splits of a row (Flash-Decoding)
rope.py                RoPE inside kernels
rope_and_write_kv.py   RoPE and KV writes of many tokens
move_path.py           moves the accepted path of a tree of drafts in the pools of all layers
"""
