"""The engine: requests wait, take a row and its pages, are read, decode on the device, and leave.

Where to look:
  engine.py      what callers use, in any thread
  loop.py        one step after the other: scheduler, runner and the choice of K together
  frontend.py    requests of prompts, deltas and results of tokens
  scheduler.py   decisions on the host: who waits, is read, decodes, is preempted; works without JAX
  plan.py        what a decision says
  needs.py       how many tokens, slots and pages a request may need
  reading.py     which prompts are read, page by page, and what they share
  passes.py      which segments of which prompts a prefill pass reads
  pages.py       which pages of the cache are free, held, or kept for later requests
  prefix.py      which pages hold the beginning of which text
  request.py     a request, and what has become of it
  inbox.py       where the owner of requests learns of their progress
  metrics.py     what the engine does and has done, in numbers
  turns.py       one caller at a time
  runner.py      decisions carried out: the weights and the state of the batch on the device
  programs.py    every program that the runner sends to the device
  packing.py     what the host tells a program, in one array
  state.py       that state, and how a request enters and leaves it
  step.py        what the programs compute: rounds of drafting and verifying, and prefill
  exchange.py    what host and device tell each other: segments, calls, logs
  compiling.py   how programs are compiled, before their first call
  guard.py       notices what is compiled after warm-up
  interrupts.py  Ctrl-C, held off while the state changes hands
  adaptive.py    how many drafts the next rounds make
  costs.py       what rounds cost, as a table that can be kept
  kept.py        files that a start leaves to the next one: kept_programs.py, kept_costs.py; made_of.py
                 tells what programs are made of
"""
