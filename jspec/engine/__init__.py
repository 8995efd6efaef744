"""The engine: requests wait, take a row and its pages, are read, decode on the device, and leave.

Where to look:
  engine.py      the loop over the other parts
  scheduler.py   decisions on the host: who waits, who enters which row; works without JAX
  pages.py       which pages of the cache are free
  request.py     a request, and what has become of it
  turns.py       one caller at a time
  runner.py      decisions carried out: the weights and the state of the batch on the device
  programs.py    every program that the runner sends to the device
  state.py       that state, and how a request enters and leaves it
  step.py        what the programs compute: rounds of drafting and verifying, and prefill
  compiling.py   how a program is compiled, before its first call
  interrupts.py  Ctrl-C, held off while the state changes hands
  adaptive.py    how many drafts the next rounds make
  costs.py       what rounds cost, as a table that can be kept
"""
