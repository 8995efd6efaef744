"""Decisions on the host, without JAX: which requests wait, prefill, decode or are preempted, and with which pages.

scheduler.py           the scheduler
turns.py               turns of tenants whose requests wait
schedule.py            its decision, a ``Schedule``
prefill_queue.py       the next chunk of each prompt, and prefix-cache hits
prefill_batching.py    the chunks of a prefill batch
page_requirements.py   how many cache slots and pages a request needs
page_pool.py           which pages are free, held, or cached
prefix_cache.py        which page holds which prefix
snapshots.py           snapshots of recurrent states, by page
"""
