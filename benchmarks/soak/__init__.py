"""Half an hour of everything that clients do to a server, right and wrong, beside one that only wants its text.

    python -m benchmarks.soak.run --minutes 30 --streams 2000 --bodies 10000 --out DIR

run.py               the program: a server process, its clients, and what is asserted of both
streams.py           random streamed requests, of which some leave, some give up, and some are wrong
bodies.py            the largest values of every field of every request
hostile_grammars.py  grammars that were written to do harm
"""
