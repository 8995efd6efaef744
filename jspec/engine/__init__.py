"""The engine: requests wait, take a row and its pages, are read, decode on the device, and leave.

Where to look:
  engine.py       what callers use, in any thread
  loop.py         one step after the other: scheduler, runner and the choice of K together
  processor.py    requests of prompts, deltas and results of tokens
  request.py      a request, and what has become of it
  inbox.py        where the owner of requests learns of their progress
  metrics.py      what the engine does and has done, in numbers
  turns.py        one caller at a time
  interrupts.py   Ctrl-C, held off while the state changes hands
  scheduler/      decisions on the host, without JAX: who waits, is read, decodes, is preempted, and with which pages
  runner/         decisions carried out: compiled programs, and the state of the batch on the device
  adaptive/       how many drafts the next rounds make and verify, and what rounds cost
  aot_cache/      compiled programs and measured costs on disk, for the next process
  multihost/      several devices, of one process or of more
"""
