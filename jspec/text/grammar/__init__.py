"""Grammars for structured outputs, with llguidance: allowed and jump-forward tokens of each completion.

Clients are not trusted, and llguidance does not protect against hostile grammars. So static checks refuse the largest, and
every other one is compiled in a child process with limits first. Nothing is imported here, to keep that process small.

grammars.py    compiles the grammars of requests, and caches them
source.py      from structured outputs to llguidance's grammar text
schema.py      closes the objects of JSON schemas
limits.py      limits of compilation, and static checks
process.py     the server's side of the process that tries grammars
worker.py      main program of that process
messages.py    messages between the two
matcher.py     llguidance's matchers, in both processes
constraint.py  the state of one completion in its grammar
"""
