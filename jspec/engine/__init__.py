"""The engine: requests wait, are admitted to a row with pages, prefill, decode on the device, and end.

Where to look:
  engine.py       the engine's methods, for any thread
  handle.py       submits, waits and cancels for the threads of callers; subscriber.py: a caller's requests and output queue
  thread.py       the engine's own thread; mailbox.py: what others want of it; core.py: its turn
  pausing.py      what keeps it from making steps; lifecycle.py: how callers pause it, let it sleep and close it;
                  beside_trainer.py: the same as methods of a loaded model
  jax_settings.py the settings that it shares with callers
  forks.py        refuses processes that were forked from one with a model
  decoding.py     drafter, verification rule, and what may be chosen between calls
  loop.py         one step after the other: schedule, execute, read; chooses the round shape
  frontend.py     makes requests of prompts, and deltas and results of tokens; contradictions.py: options that leave no token
  scores.py       the log-probabilities of given completions
  request.py      a request, and its progress
  round_log.py    the logs of rounds, on the device and on the host
  metrics.py      metrics of an engine
  scheduler/      decisions on the host, without JAX: who waits, prefills, decodes, is preempted, and with which pages
  runner/         their execution: compiled programs, and the state of the batch on the device
  adaptive/       how many drafts the next rounds make and verify, and what rounds cost
  aot_cache/      compiled programs and measured costs on disk, for later processes
  multihost/      several devices, of one process or of more
"""
