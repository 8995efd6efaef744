"""The engine: requests wait, take a row and its pages, are read, decode on the device, and leave.

Where to look:
  engine.py       what callers use, in any thread
  gateway.py      how the threads of callers reach the engine's; client.py: what they submit, and the queues of outputs
  thread.py       the engine's own thread; core.py: what it does; jax_settings.py: what it has in common with callers
  loop.py         one step after the other: scheduler, runner and the choice of K together
  processor.py    requests of prompts, deltas and results of tokens
  request.py      a request, and what has become of it
  metrics.py      what the engine does and has done, in numbers
  scheduler/      decisions on the host, without JAX: who waits, is read, decodes, is preempted, and with which pages
  runner/         decisions carried out: compiled programs, and the state of the batch on the device
  adaptive/       how many drafts the next rounds make and verify, and what rounds cost
  aot_cache/      compiled programs and measured costs on disk, for the next process
  multihost/      several devices, of one process or of more
"""
