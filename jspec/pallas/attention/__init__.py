"""Attention over a paged KV cache, and the rotary embedding.

reference.py           the definition of attention
paged.py               paged attention for few query tokens, split over the KV cache
decode.py              rotary embedding, KV writes and attention in one launch
prefill_sm90.py        attention of many query tokens on Hopper GPUs
prefill_plan.py        its blocks of queries and tiles of cache slots
flash.py               the running softmax of one program instance
merge_splits.py        merges partial softmaxes (Flash-Decoding)
rope.py                the rotary embedding inside kernels
rope_and_write_kv.py   rotary embedding and KV writes of many tokens
"""
