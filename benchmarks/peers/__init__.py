"""vLLM and jspec on the same shapes, in turn on one card: ``python -m benchmarks.peers``.

rows.py         what is compared
folders.py      the config.json of a shape, which vLLM reads
of_vllm.py      times steps of vLLM; runs in an environment that has vLLM, and needs nothing of jspec
of_jspec.py     times rounds of jspec
children.py     runs either of them, within a time
"""
