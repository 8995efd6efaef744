"""The commands of ``jspec`` that run a model in this process, and what they share.

generate.py     ``jspec generate``
chat.py         ``jspec chat``
demo.py         ``jspec demo``, and where the models are that come with jspec
model_args.py   arguments that name a model and its draft, of ``serve`` and ``bench`` too
terminal.py     a completion on the screen while it grows
"""
