"""The commands of ``jspec`` that run a model in this process.

generate.py     ``jspec generate``
chat.py         ``jspec chat``
demo.py         ``jspec demo``, and the folder of the models that come with jspec
model_args.py   options of model and speculation, which ``serve`` and ``bench`` have
group_args.py   options of several hosts, which these have too
reply.py        what of a reply is reasoning, text and calls
interrupts.py   has Ctrl-C end a command also where Python drops it
terminal.py     prints a streamed completion, with accepted drafts in colour
warming.py      says how far the warm-up of a model is
xla_alarms.py   keeps XLA's alarms about slow compilations off standard error
"""
