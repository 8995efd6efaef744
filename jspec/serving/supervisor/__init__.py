"""``jspec serve`` where several processes run a target: a supervisor on each host, which imports no JAX, starts a worker.

The supervisor restarts its worker if it is lost. That of the first host has the public address and forwards requests to
its worker, the leader of the group. With Ray, one supervisor has the workers of all hosts.

command.py         from the options to a supervisor
supervisor.py      the main loop: start, restart, shut down
worker_process.py  a worker as a child process
ray_group.py       the workers of all hosts of a Ray cluster
messages.py        messages between supervisor and worker, and the headers of forwarded requests
public.py          the public address
proxy.py           forwards requests to the worker
"""
