"""What runs on the device: compiled programs, and the state of the batch that they hand on.

model_runner.py          carries out what the scheduler decides
programs.py              the programs, as functions of flat weights and the state
compile.py               how they are compiled, before their first call
step.py                  what they compute: rounds of drafting and verifying, and prefill
state.py                 the state of the batch, and how requests enter and leave it
step_io.py               inputs and outputs of a step: prefill chunks, calls, logs
host_packing.py          several small arrays sent to the device as one
structured_output.py     rounds of requests that a grammar restricts
swap.py                  preempted requests in host memory
recompilation_guard.py   notices what is compiled after warm-up
"""
