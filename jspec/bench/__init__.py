"""``jspec bench``: how fast a server answers (``serve``), and how fast an engine in this process is.

The latter is ``latency`` for one batch and ``throughput`` for many prompts. Nothing that ``serve`` runs imports JAX, so it
starts quickly, and it measures any server that speaks OpenAI's protocol.
"""
