"""The device side: compiled programs, and the state of the batch.

model_runner.py          executes the schedule of a step
device_batch.py          the state of the batch on the device, and programs sent to it
program_inputs.py        the programs of a schedule, and their inputs
warmup.py                runs every program before the first request, and says how far that is
round_costs.py           seconds of every round shape, cached or measured
programs.py              the programs in a table
step_builder.py          their functions, of flat weights and the state
compile.py               compiles programs before their first call
step.py                  a round: draft, verify, commit
commit.py                the end of a round: emitted tokens, stored features
tree.py                  the end of a round whose drafts are a tree
prefill.py               prefill, and the drafter's catch-up
state.py                 the arrays of the state; admission, the rows of a call
recurrent.py             how far each row is, of a target with recurrent states
saved.py                 copies of rows, pages and recurrent states
step_io.py               inputs of programs: chunks to prefill, rows to decode
host_packing.py          packs small arrays into one
split_rounds.py          rounds in two programs, between which the host asks the grammars of requests
swap.py                  preempted requests in host memory
sleeping.py              weights and state that leave the device for a while
shard_map.py             programs over several devices (``jax.shard_map``)
follower.py              replays what the process sends that leads others
recompilation_guard.py   reports compilations after warm-up
"""
