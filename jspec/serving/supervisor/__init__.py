"""Keepers: where several processes run a target, the HTTP process stands outside of their group.

``jspec serve`` is a *keeper* then, on every host. It imports no JAX, and starts its *member* of the group, a process of its
own (``worker_process.py``, ``worker.py``; they talk through ``link.py``), again and again if need be
(``supervisor.py``). The keeper of the first host has the public address (``public.py``), and passes requests on to its
member (``proxy.py``). With Ray one keeper has the members of all hosts (``ray_group.py``).
"""
