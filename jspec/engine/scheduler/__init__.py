"""Decisions on the host, which need no JAX: which requests wait, prefill, decode, are preempted, and with which pages.

scheduler.py           the scheduler
schedule.py            what it decides, as a ``Plan``
prefill_queue.py       the next chunk of each prompt, and prefix-cache hits
prefill_batching.py    which chunks a prefill batch has
page_requirements.py   how many cache slots and pages a request needs
page_pool.py           which pages are free, held, or cached
prefix_cache.py        which page holds which prefix
"""
