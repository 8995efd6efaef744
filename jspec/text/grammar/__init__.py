"""Grammars that restrict completions, with llguidance: which tokens may come next, and which ones have to.

``Grammars`` compiles what requests ask for, and gives each of them a ``GrammarConstraint``. A grammar comes from a stranger,
and llguidance was not written for enemies: so ``limits`` refuses the largest at a glance, and every other one is tried in a
child process first (``process`` on the server's side, ``worker`` on the other). Nothing is imported here, because that
process needs next to nothing.
"""
